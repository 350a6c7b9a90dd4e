"""build/<stack>/ on this machine: a view of the stack's outputs, written by `pulumi up`, the preview and `flotilla render` alike."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePath

from cluster_tasks.identity import TOKEN, make_token

WRITTEN = ".written.json"  # names of the files that were written last, so that those no longer rendered can go

# Have what flotilla:task.env gives. Others are brought to nodes with their modes, for whichever user an image has.
WITH_ENVIRONMENT = (".yml", ".sbatch", ".sh")


def write(folder: Path, files: Mapping[str, str], token: str | None = None) -> None:
    """Writes `{path in the folder: text}`, each complete or not at all, and removes what was written before and is no longer rendered.

    The folder is closed to other users: files have values of flotilla:task.env, logs whatever a job prints.
    Without `token` the one in the folder stays; where there is none, one is made. Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    write_files(folder, files)
    for name in _written(folder) - files.keys():
        _remove(folder, name)
    _write(folder / WRITTEN, json.dumps(sorted(files)))
    make_token(folder / TOKEN, token)


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Writes `{path in the folder: text}`, each complete or not at all. Raises OSError."""
    for name, text in files.items():
        _write(folder / name, text, 0o600 if "/" not in name and name.endswith(WITH_ENVIRONMENT) else 0o644)


def remove(folder: Path) -> None:
    """Removes what `write` wrote, and the folders that this leaves empty: volumes, logs and runs stay. Raises OSError."""
    for name in [*_written(folder), WRITTEN, TOKEN]:
        _remove(folder, name)


def _written(folder: Path) -> set[str]:
    try:
        return set(json.loads((folder / WRITTEN).read_text()))
    except FileNotFoundError:
        return set()


def _write(file: Path, text: str, mode: int = 0o600) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=f".{file.name}.", delete=False, encoding="utf-8") as part:
        part.write(text)
    Path(part.name).chmod(mode)
    Path(part.name).replace(file)


def _remove(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    if name.endswith(".py"):
        shutil.rmtree((folder / name).parent / "__pycache__", ignore_errors=True)  # of who ran it there
    for parent in (*PurePath(name).parents[:-1], PurePath()):
        with contextlib.suppress(OSError):  # it stays while something else is in it
            (folder / parent).rmdir()
