"""What tells rows apart: of equal rows the same in every process, whatever Python values they hold. No torch."""

from __future__ import annotations

import copyreg
import hashlib
import json
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from types import FunctionType
from typing import Any

from trainer.episodes import Prompt
from trainer.errors import ConfigError

AS_TEXT = (bytes, bytearray, date, time, timedelta, Decimal, Enum)  # whose text says all that they are
NAMED = (type, FunctionType)


def fingerprint(prompts: list[Prompt]) -> str:
    """16 hex digits over token ids and columns of every prompt. Raises ConfigError for a column that cannot be read back."""
    digest = hashlib.sha256()
    for prompt in prompts:
        try:
            text = canonical([prompt.index, prompt.token_ids, prompt.row])
        except (TypeError, ValueError, RecursionError, AttributeError):
            raise ConfigError(f"data.path: row {prompt.index}: {_culprit(prompt.row)}") from None
        digest.update(text.encode())
    return digest.hexdigest()[:16]


def canonical(value: Any) -> str:
    """JSON of anything that a process could send to another one. Raises TypeError, ValueError or RecursionError for all else."""
    try:
        return json.dumps(value, sort_keys=True, default=_described)
    except TypeError:  # keys of several types, which have no order, or that JSON has not
        return json.dumps(_with_text_keys(value), sort_keys=True, default=_described)


def _described(value: Any) -> Any:
    """What JSON has not, by what it has. An object is its type and its state, as pickle takes it apart: its text may have its address."""
    if isinstance(value, AS_TEXT):
        return str(value)
    if isinstance(value, set | frozenset):
        return sorted(map(canonical, value))
    if hasattr(value, "tolist"):  # of numpy and torch
        return _with_text_keys(value.tolist())
    if isinstance(value, NAMED):
        return f"{value.__module__}.{value.__qualname__}"
    special: Any = copyreg.dispatch_table.get(type(value))
    reduced: Any = special(value) if special else value.__reduce_ex__(2)
    if isinstance(reduced, str):
        return reduced
    made_by, arguments, state, listed, mapped = [*reduced, None, None, None][:5]
    return _with_text_keys([made_by, arguments, state, list(listed or ()), [[canonical(key), each] for key, each in mapped or ()]])


def _with_text_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {canonical(key): _with_text_keys(each) for key, each in value.items()}
    return [*map(_with_text_keys, value)] if isinstance(value, list | tuple) else value


def _culprit(row: dict[str, Any]) -> str:
    """The first column of a row that cannot be told apart, and why."""
    for name, value in row.items():
        try:
            canonical(value)
        except (TypeError, ValueError, RecursionError, AttributeError) as error:
            why = f"column {name!r} has what cannot be written down ({type(error).__name__}: {str(error)[:120]})"
            return (
                f"{why}, so no start could tell that it resumes on the same rows; give text, numbers, lists, or objects that pickle takes"
            )
    return "a column's name is not text"
