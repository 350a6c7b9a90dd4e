"""Models and datasets of Hugging Face on every node of a cluster, each downloaded once.

    ray job submit --working-dir . -- python -m cluster_tasks.cache Qwen/Qwen3-8B           every node of the cluster has it
    srun --ntasks-per-node=1 python -m cluster_tasks.cache --dataset openai/gsm8k           without Ray, on a shared cache

Where nodes share the cache (flotilla:cache.path), one process downloads while all others wait, and no process downloads what it
finds: the lock is that of what recipes prepare. Where they do not, a Ray job downloads on its own node and hands the files on to
the other nodes, which ask the hub for nothing. huggingface_hub takes a lock per file by itself, so jobs that just load a model do
not download it twice either; what they lack is the deadline, and the way to nodes that do not share.

Exit codes: 0 where every node has it; 2 where it is not to be had, or not in time.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before imports that this environment may not have
    from stacks.host.extras import explain_missing

    explain_missing()

from cluster_tasks.recipes.job.lock import turn
from cluster_tasks.recipes.job.process import JobError
from stacks.errors import UserError, first_line

CHUNK = 64 * 2**20  # bytes, on their way between two nodes at a time
HAND_ON_SECONDS = 120  # for one chunk to reach all nodes
PART = ".flotilla-part"


class CacheError(UserError):
    """What was asked for is not to be had, or not in time."""


# One download


def fetch(repository: str, kind: str, revision: str | None, wait: float) -> Path:
    """The folder of a repository in the cache. Of all processes that share the cache one downloads it, the others wait.

    Raises CacheError where it is not to be had, or not within `wait` seconds.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    name = "--".join([f"{kind}s", *repository.split("/")])
    folder = Path(constants.HF_HUB_CACHE) / name
    lock = folder.parent / ".locks" / f"{name}.owner"
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        with turn(repository, folder, lock, wait, tell=lambda line: print(f"cache: {line}", file=sys.stderr, flush=True)):
            snapshot_download(repository, repo_type=kind, revision=revision)
    except JobError as error:
        raise CacheError(f"{error} (flotilla:cache.wait={wait:g})") from None
    except (HfHubHTTPError, OSError, ValueError) as error:  # huggingface_hub's other errors are among these
        where = "offline (flotilla:cache.offline)" if constants.HF_HUB_OFFLINE else constants.ENDPOINT
        raise CacheError(f"{repository}, from {where}: {first_line(error)}") from None
    return folder


# From node to node


@dataclass(frozen=True)
class Entry:
    """A file, or a link, of a repository's folder in the cache."""

    path: str  # below the folder of the cache
    size: int
    link: str = ""  # what a link leads to


def entries(folder: Path) -> Iterator[Entry]:
    """Of a repository's folder: files first, as links lead to them."""
    below = sorted(path for path in folder.rglob("*") if path.is_symlink() or path.is_file())
    for path in sorted(below, key=Path.is_symlink):
        name = str(path.relative_to(folder.parent))
        yield Entry(name, 0, str(path.readlink())) if path.is_symlink() else Entry(name, path.stat().st_size)


class Receiver:
    """A node that is handed files; a Ray actor."""

    def __init__(self, cache: str | None = None):
        from huggingface_hub import constants

        self.cache = Path(cache or constants.HF_HUB_CACHE)

    def missing(self, wanted: list[Entry]) -> list[Entry]:
        return [entry for entry in wanted if not self._has(entry)]

    def _has(self, entry: Entry) -> bool:
        path = self.cache / entry.path
        return path.is_symlink() if entry.link else path.is_file() and path.stat().st_size == entry.size

    def write(self, entry: Entry, offset: int, data: bytes) -> None:
        """A part of a file, which gets its name with the last part."""
        path = self.cache / entry.path
        part = path.with_name(path.name + PART)
        part.parent.mkdir(parents=True, exist_ok=True)
        with part.open("r+b" if offset else "wb") as file:
            file.seek(offset)
            file.write(data)
        if offset + len(data) == entry.size:
            part.replace(path)

    def link(self, entry: Entry) -> None:
        path = self.cache / entry.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(entry.link)


def hand_on(folder: Path, receivers: list[Any]) -> int:
    """Gives what they lack of a repository's folder to Receivers on other nodes. Returns the bytes that went out, each counted once.

    Raises CacheError where a node cannot take it.
    """
    import ray
    from ray.exceptions import RayError

    wanted, sent = list(entries(folder)), 0
    try:
        missing = ray.get([receiver.missing.remote(wanted) for receiver in receivers], timeout=HAND_ON_SECONDS)
        for entry in wanted:
            takers = [receiver for receiver, files in zip(receivers, missing, strict=True) if entry in files]
            if takers and entry.link:
                ray.get([receiver.link.remote(entry) for receiver in takers], timeout=HAND_ON_SECONDS)
            elif takers:
                for offset, data in _chunks(folder.parent / entry.path):
                    shared = ray.put(data)  # Ray's stores pass it on from node to node
                    ray.get([receiver.write.remote(entry, offset, shared) for receiver in takers], timeout=HAND_ON_SECONDS)
                sent += entry.size
    except RayError as error:
        raise CacheError(f"{folder.name} cannot be handed on: {first_line(error)}") from None
    return sent


def _chunks(file: Path) -> Iterator[tuple[int, bytes]]:
    """`(offset, bytes)`; an empty file is one empty chunk."""
    with file.open("rb") as opened:
        yield 0, opened.read(CHUNK)
        while data := opened.read(CHUNK):
            yield opened.tell() - len(data), data


def _other_nodes() -> list[Any]:
    """A Receiver on every node of the cluster but this one."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    where = [NodeAffinitySchedulingStrategy(node, soft=False) for node in others(ray.nodes(), ray.get_runtime_context().get_node_id())]
    return [ray.remote(Receiver).options(num_cpus=0, scheduling_strategy=place).remote() for place in where]


def others(nodes: list[dict[str, Any]], own: str) -> list[str]:
    """Ids of the nodes, as Ray lists them, that are alive and not our own; Ray keeps on listing those that are gone."""
    return [node["NodeID"] for node in nodes if node["Alive"] and node["NodeID"] != own]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m cluster_tasks.cache", description="Fetches models once for all nodes.")
    add, ray_address = parser.add_argument, os.environ.get("RAY_ADDRESS", "")
    add("repositories", nargs="+", help="such as Qwen/Qwen3-8B")
    add("--dataset", action="store_true", help="they are datasets")
    add("--revision", help="branch, tag or commit; main by default")
    add("--wait", type=float, default=float(os.environ.get("FLOTILLA_CACHE_WAIT") or 3600), help="seconds for another's download to end")
    options: Any = parser.parse_args(argv)
    if ray_address.startswith("http"):
        parser.error(f"RAY_ADDRESS={ray_address}: submit it there: ray job submit --working-dir . -- python -m cluster_tasks.cache ...")
    try:
        receivers: list[Any] = []
        if ray_address:
            import ray

            ray.init(log_to_driver=False, logging_level=logging.ERROR)
            receivers = _other_nodes()
        for repository in options.repositories:
            folder = fetch(repository, "dataset" if options.dataset else "model", options.revision, options.wait)
            sent = hand_on(folder, receivers) if receivers else 0
            print(f"{repository}: in {folder}, {sent / 1e9:.2f} GB handed on to {len(receivers)} other nodes", flush=True)
    except (CacheError, ConnectionError) as error:
        print(f"cache: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
