"""Texts to token ids: all at once, and only the first time; later starts read the ids from a file."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import tokenizers
import transformers
from transformers import PreTrainedTokenizerBase

from trainer.runs import runs_root

FOLDER = ".tokens"  # below the runs root
LEAST = 1000  # fewer texts take no time worth a file


def token_ids(texts: list[str], tokenizer: PreTrainedTokenizerBase, *, special: bool) -> list[list[int]]:
    """Ids of each text; `special` has the tokenizer add its own tokens, such as the first of a sequence."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if len(texts) < LEAST or fast is None:
        return _tokenized(texts, tokenizer, special)
    versions = f"{tokenizers.__version__} {transformers.__version__} {type(tokenizer).__name__} {special}"
    key = hashlib.sha256(versions.encode())
    key.update(fast.to_str().encode())
    key.update(json.dumps(texts).encode())
    file = runs_root() / FOLDER / f"{key.hexdigest()[:32]}.npy"
    found = _read(file, len(texts))
    if found is None:
        found = _tokenized(texts, tokenizer, special)
        _write(file, found)
    return found


def _tokenized(texts: list[str], tokenizer: PreTrainedTokenizerBase, special: bool) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=special)["input_ids"] if texts else []  # type: ignore[return-value]


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
