"""What a node has written, without its secrets. Standard library alone: a Ray job takes the text of this file to each node.

Secrets are replaced where the text is read: the values of variables whose names say so, in the environment of every process of the
cluster, wherever they stand; and what looks like one by its shape or by the name before it.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

FILE_BYTES, NODE_BYTES = 2**20, 2**24  # of each file its end; of a node its newest files
SECRET = r"[\w.-]*(?:TOKEN|SECRET|PASSW|PASSPHRASE|API[_-]?KEY|ACCESS[_-]?KEY|PRIVATE[_-]?KEY|CREDENTIAL|WEBHOOK|AUTHORIZATION)[\w.-]*"
NO_SECRET = re.compile(r"(?i)(?:_PATH|_FILE|_MODE|_DIR|TOKENIZERS_PARALLELISM|_TOKENS|_TOKENIZER)$|TOKENIZER")
NAMED = re.compile(rf"(?i)(?P<name>{SECRET})(?P<is>[\"']?(?:\s*[=:,]\s*|\s+)(?:Bearer\s+)?[\"']?)(?P<value>[^\s\"',;}}&]{{6,}})")
SHAPES = (
    re.compile(r"\b(?:hf_|sk-|ghp_|github_pat_|glpat-|xox[bpa]-|AKIA|ASIA|ya29\.)[\w-]{8,}"),
    re.compile(r"(?i)(?<=bearer )[\w.~+/=-]{8,}"),
    re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"),  # a user and password in a URL
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----", re.DOTALL),
    re.compile(r"\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]+"),  # a JSON web token
)
GONE = "[secret]"
DUMP = re.compile(r"(?:nccl|comm_lib)_trace_rank_\d+$")
ENTRIES = 100  # collectives of each rank: a rank that hangs is told by its last ones
COMMANDS = {"nvidia-smi": ["nvidia-smi"], "rocm-smi": ["rocm-smi"], "memory": ["free", "-m"], "disks": ["df", "-h"]}
COMMAND_SECONDS = 10


def secret_values(environment: Mapping[str, str], also: Iterable[str] = ()) -> set[str]:
    """Values of the variables whose names say that they are secret, and of those named in `also`."""
    wanted = set(also)
    return {v for n, v in environment.items() if len(v) >= 6 and (n in wanted or _is_secret(n))}


def _is_secret(name: str) -> bool:
    return bool(re.fullmatch(f"(?i){SECRET}", name)) and not NO_SECRET.search(name)


def redact(text: str, values: Iterable[str] = ()) -> str:
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, GONE)
    for shape in SHAPES:
        text = shape.sub(GONE, text)
    return NAMED.sub(_named, text)


def _named(found: re.Match[str]) -> str:
    return f"{found['name']}{found['is']}{GONE}" if _gives(found) else found[0]


def _gives(found: re.Match[str]) -> bool:
    """Whether it gives a secret a value: NAME=value, "name": "value", --name value."""
    assigned = "=" in found["is"] or ":" in found["is"] or found["name"].startswith("--")
    return assigned and not NO_SECRET.search(found["name"])


def learned(texts: Iterable[str]) -> set[str]:
    """Values that some text gives a secret by its name, and another may hold without. Words of a language have no digits."""
    found = (match for text in texts for match in NAMED.finditer(text) if _gives(match))
    return {value for match in found if len(value := match["value"]) >= 8 and any(letter.isdigit() for letter in value)} - {GONE}


def environments(pids: Iterable[int]) -> dict[str, str]:
    """Of processes, by NAME and the pid, so that none hides another's."""
    found = {}
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
        except OSError:
            continue
        found |= {f"{name}\0{value}": value for name, is_one, value in (entry.partition("=") for entry in text.split("\0")) if is_one}
    return found


def secrets_of(pids: Iterable[int], also: Iterable[str] = ()) -> set[str]:
    pairs = [name.partition("\0")[::2] for name in environments(pids)]
    return set().union(*(secret_values({name: value}, also) for name, value in pairs)) if pairs else set()


def harvest(folders: Iterable[Path], values: Iterable[str]) -> dict[str, str]:
    """Text of the files below the folders and of the node's versions, by name; `cut.txt` says what was left out."""
    values = set(values)
    files = sorted(
        (file for folder in folders if folder.is_dir() for file in folder.rglob("*") if _kept(file)),
        key=lambda file: file.stat().st_mtime,
        reverse=True,
    )
    found, cut, left = {}, [], NODE_BYTES
    for file in files:
        try:
            size = file.stat().st_size
            with file.open("rb") as stream:
                stream.seek(max(0, size - FILE_BYTES))
                text = stream.read(FILE_BYTES).decode(errors="replace")
        except OSError as error:
            cut.append(f"{file}: {error.strerror}")
            continue
        if len(text) > left:
            cut.append(f"{file}: left out, {size} bytes: the newest {NODE_BYTES >> 20} MiB of a node are kept")
            continue
        if size > FILE_BYTES:
            cut.append(f"{file}: its last {FILE_BYTES >> 20} MiB of {size} bytes")
        left -= len(text)
        found[f"{file.parent.name}/{file.name}"] = text
    values |= learned(found.values())
    found = {name: redact(text, values) for name, text in found.items()}
    found["versions.txt"] = versions()
    found |= {f"{name}.txt": said for name, command in COMMANDS.items() if (said := output(command, values))}
    return found | ({"cut.txt": "\n".join(cut) + "\n"} if cut else {})


class _Plain(pickle.Unpickler):
    """Lists, maps, text and numbers alone: a file on shared storage runs nothing here."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it holds a {module}.{name}")


def traces(folder: Path, values: Iterable[str] = ()) -> dict[str, str]:
    """What PyTorch's flight recorder has dumped below the folder, as text: a line for each rank's state, then one for each collective.

    Of a rank the last ENTRIES; the files stay, for `torchfrtrace`, which compares ranks.
    """
    values = set(values)
    files = sorted(file for file in folder.rglob("*") if DUMP.search(file.name)) if folder.is_dir() else []
    return {f"flight-recorder/{file.relative_to(folder)}.jsonl": redact(_trace(file), values) for file in files}


def _trace(file: Path) -> str:
    try:
        dump = _Plain(io.BytesIO(file.read_bytes())).load()
        entries = dump["entries"]
    except (OSError, pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        return f"{file}: cannot be read: {error or type(error).__name__}\n"
    state = {"file": str(file), **{key: value for key, value in dump.items() if key != "entries"}, "collectives": len(entries)}
    return "".join(json.dumps(line, default=str) + "\n" for line in [state, *entries[-ENTRIES:]])


def recorded() -> Path:
    """Where the ranks of this process's cluster dump; a folder that is not there where they do not."""
    return Path(os.environ.get("TORCH_FR_DUMP_TEMP_FILE") or "/nonexistent/rank").parent


def _kept(file: Path) -> bool:
    """Not what those who look on have printed."""
    return file.is_file() and not file.is_symlink() and "flotilla-debug-" not in file.name


def versions() -> str:
    packages = sorted(f"{package.metadata['Name']}=={package.version}" for package in distributions())
    return "\n".join([f"{platform.platform()}, Python {platform.python_version()}", *packages]) + "\n"


def output(command: list[str], values: Iterable[str] = (), env: Mapping[str, str] | None = None) -> str:
    """What it prints, or why it did not; empty where there is no such program."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS, env=env or os.environ, check=False)
    except FileNotFoundError:
        return ""
    except subprocess.TimeoutExpired:
        return f"{command[0]} has not answered within {COMMAND_SECONDS} s\n"
    return redact(done.stdout + done.stderr, values)
