"""Rows of a file or a function. No torch: a path, its columns and its functions are checked before it is imported."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from trainer.configs.sections import DataConfig
from trainer.errors import ConfigError
from trainer.import_path import check_args, find

Row = dict[str, Any]
RETURNED: dict[Any, Collection[Any]] = {}  # all rows of functions that return them at once: preflight and the run call those once
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def check(config: DataConfig, *, answers: bool = True) -> None:
    """That the data can be read, and the columns of its first row. Raises ConfigError."""
    where, columns = first_row(config)
    column(columns, config.prompt, "data.prompt", where)
    if answers:
        column(columns, config.answer, "data.answer", where)


def first_row(config: DataConfig) -> tuple[str, Row]:
    """Of `read_rows`. Raises ConfigError where there is none."""
    for where, columns in read_rows(config):
        return where, columns
    raise no_rows(config)


def no_rows(config: DataConfig) -> ConfigError:
    return ConfigError(f"data.path: {config.path} has no rows; at least one is needed")


def read_rows(config: DataConfig) -> Iterator[tuple[str, Row]]:
    """Each row with a word on where it stands: file:line, or a number."""
    path = config.path
    if path.endswith(".jsonl"):
        yield from _jsonl(Path(path))
    elif path.endswith(".parquet"):
        yield from _parquet(Path(path))
    elif ":" in path:
        yield from _function(path, config.args)
    else:
        hint = "; data sets of the hub are not supported, write their rows to a file" if re.fullmatch(r"[\w.-]+/[\w.-]+", path) else ""
        raise ConfigError(f"data.path: {path!r} is neither a .jsonl or .parquet file nor package.module:function{hint}")


def _jsonl(path: Path) -> Iterator[tuple[str, Row]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                where = f"{path}:{number}"
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except ValueError as error:  # bad JSON or bad UTF-8
                    raise ConfigError(f"data.path: {where}: not JSON: {error}; each line must be one JSON object") from error
                if SURROGATE.search(line):
                    _require_unicode(row, where)
                yield where, _row(row, where)
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> ConfigError:
    there = f"a path that {socket.gethostname()} can read" if path.is_absolute() else f"a path below {Path.cwd()}, or an absolute one"
    return ConfigError(f"data.path: {path}: {error.strerror or error}; set {there}")


def _parquet(path: Path) -> Iterator[tuple[str, Row]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError as error:
        raise ConfigError(f"data.path: {path}: reading parquet needs pyarrow (pip install pyarrow)") from error
    try:
        number = 0
        with pq.ParquetFile(path) as file:
            for part in file.iter_batches():
                for row in part.to_pylist():
                    yield f"{path}: row {number}", row
                    number += 1
    except OSError as error:
        raise _unreadable(path, error) from error
    except pa.ArrowException as error:
        raise ConfigError(f"data.path: {path}: not a parquet file: {error}; write it again, or give .jsonl") from error


def _function(spec: str, args: dict[str, Any]) -> Iterator[tuple[str, Row]]:
    function = find(spec, "data.path")
    check_args(function, 0, args, "data.args")
    key = (function, json.dumps(args, sort_keys=True, default=repr))
    rows = RETURNED[key] if key in RETURNED else function(**args)
    if not isinstance(rows, Iterable):
        raise ConfigError(f"data.path: {spec} returned a {type(rows).__name__}, not rows; return a list of dicts, or yield them")
    if isinstance(rows, Collection):
        RETURNED[key] = rows
    for number, row in enumerate(rows):
        where = f"{spec}: row {number}"
        yield where, _row(row, where)


def _require_unicode(row: Any, where: str) -> None:
    """JSON can write half of a surrogate pair, which is no text: tokenizers refuse it."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise ConfigError(f"data.path: {where}: {half} is half of a surrogate pair and no text; remove it, or write both halves") from None


def _row(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise ConfigError(f"data.path: {where}: a row is a JSON object of columns, not a {type(row).__name__}")
    return row


def column(row: Row, name: str, setting: str, where: str) -> Any:
    if row.get(name) is None:
        if name in row:
            raise ConfigError(f"{setting}: {where}: column {name!r} is empty; fill it in, or leave the row out")
        columns = ", ".join(map(str, row)) or "none"
        raise ConfigError(f"{setting}: {where}: column {name!r} is missing; the columns are {columns}; set {setting} to one, or add it")
    return row[name]
