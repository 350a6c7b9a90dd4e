"""One archive of what a cluster has written: logs of every node, versions, the rendered stack, stacks of processes. No secret is in it."""

from __future__ import annotations

import io
import os
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster_tasks.debug import harvest, probe
from cluster_tasks.debug.gather import DebugError
from cluster_tasks.identity import TOKEN
from cluster_tasks.local.plan import node_addresses, ray_folder, read_task
from stacks.schema import Stack

RENDERED = (".yml", ".yaml", ".sh", ".sbatch", ".log")


def check_output(file: Path) -> None:
    """Raises DebugError before anything is collected."""
    if file.exists():
        raise DebugError(f"--output {file}: the file exists; name another, or remove it")
    if not file.parent.is_dir():
        raise DebugError(f"--output {file}: there is no folder {file.parent}")
    if not os.access(file.parent, os.W_OK):
        raise DebugError(f"--output {file}: you may not write to the folder {file.parent}")


def known_secrets(stack: Stack, root: Path, environment: Mapping[str, str]) -> set[str]:
    """What this machine knows: its own environment, that of env.sh, the token, and what the task takes from the shell."""
    from_shell = {name for name, value in stack.task.env.items() if value is None}
    values = harvest.secret_values(dict(os.environ), from_shell) | harvest.secret_values(environment, from_shell)
    values |= harvest.secret_values({name: value for name, value in stack.task.env.items() if value})
    token = root / TOKEN
    return values | ({token.read_text().strip()} if token.is_file() else set())


def of_local(stack: Stack, root: Path, agents: Mapping[str, int], secrets: set[str]) -> dict[str, dict[str, str]]:
    """Of each node of this machine; what Ray has written is below its own short path while the cluster is up."""
    pids = [pid for agent in agents.values() for pid in probe.below(agent)]
    from_shell = [name for name, value in stack.task.env.items() if value is None]
    secrets |= harvest.secrets_of(pids, from_shell)
    found = {}
    for rank, _ in enumerate(node_addresses(read_task(root / "ray-cluster.dstack.yml"))):
        place = ray_folder(root) / str(rank)
        services = list(place.glob("services-*"))
        found[str(rank)] = harvest.harvest([place / "session_latest/logs", *services], secrets)
    return found


def rendered(root: Path, secrets: set[str]) -> dict[str, str]:
    """build/<stack>/ as text, but not the token's file; logs of agents by their ends."""
    files = [file for file in [*root.glob("*"), *root.glob("logs/*.log"), *root.glob("logs/ray-*/*")] if file.is_file()]
    kept = [file for file in files if file.suffix in RENDERED or "logs" in file.parts]
    return {str(file.relative_to(root)): harvest.redact(_end(file), secrets) for file in kept if file.name != TOKEN}


def _end(file: Path) -> str:
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - harvest.FILE_BYTES))
        return stream.read().decode(errors="replace")


def write(file: Path, texts: Mapping[str, str], secrets: set[str]) -> int:
    """The archive, readable by its owner alone; every text passes the redaction once more. Returns its size."""
    secrets = secrets | harvest.learned(texts.values())
    name = file.name.removesuffix(".tar.gz").removesuffix(".tgz")
    with (
        os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out,
        tarfile.open(fileobj=out, mode="w:gz") as archive,
    ):
        for path, text in sorted(texts.items()):
            content = harvest.redact(text, secrets).encode()
            entry = tarfile.TarInfo(f"{name}/{path}")
            entry.size, entry.mtime = len(content), int(time.time())
            archive.addfile(entry, io.BytesIO(content))
    return file.stat().st_size


def texts_of(nodes: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Of all nodes, by name; dumps on storage that several share are there once."""
    texts: dict[str, str] = {}
    for node, said in nodes.items():
        for name, text in said.items():
            if isinstance(text, str) and not (name.startswith("flight-recorder/") and text in texts.values()):
                texts[f"node-{node}/{name}"] = text
    return texts
