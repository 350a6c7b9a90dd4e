"""Token ids on disk, so that only the first start with some data renders and tokenizes it."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from trainer.cli.paths import runs_root

FOLDER = ".tokens"  # below the runs root
LEAST = 1000  # fewer prompts take no time worth a file


def remembered(prompts: list[Any], what: Callable[[], Any], make: Callable[[], list[list[int]]]) -> list[list[int]]:
    """The ids that `make` returns, one list for each of `prompts`: from a file, where it was called before with equal prompts and `what`.

    `what` returns all else that the ids follow from, or None where that cannot be said. An error of `make` is not remembered.
    """
    if len(prompts) < LEAST or (also := what()) is None:
        return make()
    try:
        content = json.dumps([also, prompts], ensure_ascii=False).encode()
    except (TypeError, ValueError):  # prompts that are no JSON, or no text: `make` says what is wrong with them
        return make()
    file = runs_root() / FOLDER / f"{hashlib.sha256(content).hexdigest()[:32]}.npy"
    found = _read(file, len(prompts))
    if found is None:
        found = make()
        _write(file, found)
    return found


def _read(file: Path, count: int) -> list[list[int]] | None:
    """What `_write` wrote; None where there is nothing, or something else."""
    try:
        flat = np.load(file, mmap_mode="r")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError) as error:
        print(f"warning: {file}: {error}; tokenized again", file=sys.stderr)
        return None
    lengths, ids = flat[:count], flat[count:]
    if flat.ndim != 1 or len(lengths) < count or int(lengths.sum()) != len(ids):
        print(f"warning: {file}: not the tokens of {count} texts; tokenized again", file=sys.stderr)
        return None
    return [part.tolist() for part in np.split(np.asarray(ids), np.cumsum(lengths)[:-1])]


def _write(file: Path, ids: list[list[int]]) -> None:
    """Lengths and then ids, as 32-bit integers. Atomic: several processes may start with the same data."""
    lengths = [len(part) for part in ids]
    flat = np.fromiter((number for numbers in (lengths, *ids) for number in numbers), np.int32, len(ids) + sum(lengths))
    draft = file.with_name(f".{file.stem}.{os.getpid()}.npy")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        np.save(draft, flat)
        draft.replace(file)
    except OSError as error:  # a start without a cache is slower, and no more
        print(f"warning: {file}: {error.strerror}; the next start tokenizes again", file=sys.stderr)
        with suppress(OSError):
            draft.unlink(missing_ok=True)
