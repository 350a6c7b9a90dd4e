"""Rows of files, by the end of their name. No torch."""

from __future__ import annotations

import gzip
import json
import re
import socket
from collections.abc import Callable, Iterator
from glob import glob
from pathlib import Path
from typing import Any

from trainer.configs.data import FILES
from trainer.errors import ConfigError

Found = Iterator[tuple[str, Any]]  # where it stands, and what should be a row
NESTED = 100  # lists and objects in one another; deeper rows cannot be copied or written down
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def shards(path: str) -> list[Path]:
    """The files that a path means: itself, those directly in a folder, or those that a pattern matches, in the order of their names."""
    allowed = ", ".join(FILES)
    if "://" in path and not Path(path).exists():
        raise ConfigError(
            f"data.path: {path}: an address is not read; fetch it to a file or folder here ({allowed}), name a dataset of the hub as "
            "organization/name, or a function that reads it as package.module:function"
        )
    if Path(path).is_dir():
        found = sorted(file for file in Path(path).iterdir() if file.name.endswith(FILES))
    elif set(path) & set("*?[") and not Path(path).exists():
        found = sorted(Path(match) for match in glob(path, recursive=True) if match.endswith(FILES))  # noqa: PTH207 takes absolute ones
    elif path.endswith(FILES):
        return [Path(path)]
    else:
        raise ConfigError(
            f"data.path: {path!r} is neither a file ({allowed}), nor a folder or pattern of them, nor organization/name of a hub dataset, "
            "nor package.module:function"
        )
    if not found:
        raise ConfigError(f"data.path: {path}: no file in it whose name ends with one of {allowed}")
    if len({_end(file) for file in found}) > 1:
        names = ", ".join(sorted({_end(file) for file in found}))
        raise ConfigError(
            f"data.path: {path}: files of several formats ({names}); name those of one, such as {Path(path) / '*'}{_end(found[0])}"
        )
    return found


def _end(path: Path) -> str:
    return next(end for end in FILES if path.name.endswith(end))


def rows(path: Path) -> Found:
    """Raises ConfigError where the file cannot be read."""
    readers: dict[str, Callable[[Path], Found]] = {".parquet": _parquet, ".arrow": _arrow, ".feather": _arrow, ".json": _json}
    try:
        yield from readers.get(_end(path), _jsonl)(path)
    except EOFError as error:
        raise ConfigError(f"data.path: {path}: not complete: {error}; write it again") from error
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> ConfigError:
    there = f"a path that {socket.gethostname()} can read" if path.is_absolute() else f"a path below {Path.cwd()}, or an absolute one"
    return ConfigError(f"data.path: {path}: {error.strerror or error}; set {there}")


def _jsonl(path: Path) -> Found:
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}:{number}"
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:  # bad JSON or bad UTF-8
                raise ConfigError(f"data.path: {where}: not JSON: {error}; each line must be one JSON object") from error
            except RecursionError:
                raise _too_deep(where) from None
            if line.count(b"[") + line.count(b"{") > NESTED:
                _require_flat(row, where)
            if SURROGATE.search(line):
                _require_unicode(row, where)
            yield where, row


def _json(path: Path) -> Found:
    text = path.read_bytes()
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"data.path: {path}: not JSON: {error}; a .json file is one list of objects, a .jsonl file one per line"
        ) from error
    except RecursionError:
        raise _too_deep(str(path)) from None
    if not isinstance(found, list):
        raise ConfigError(f"data.path: {path}: a {type(found).__name__}, not a list of rows; write a list of objects")
    for number, row in enumerate(found):
        where = f"{path}: row {number}"
        _require_flat(row, where)
        if SURROGATE.search(text):
            _require_unicode(row, where)
        yield where, row


def _require_flat(row: Any, where: str) -> None:
    level = [row]
    for _ in range(NESTED):
        level = [below for each in level for below in (each.values() if isinstance(each, dict) else each if isinstance(each, list) else ())]
        if not level:
            return
    raise _too_deep(where)


def _too_deep(where: str) -> ConfigError:
    return ConfigError(f"data.path: {where}: nested more than {NESTED} deep; flatten it, or leave it out")


def _require_unicode(row: Any, where: str) -> None:
    """JSON can write half of a surrogate pair, which is no text: tokenizers refuse it."""
    for name, value in row.items() if isinstance(row, dict) else [("", row)]:
        try:
            json.dumps({name: value}, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(error.object[error.start]):04x}"
            column = name.encode(errors="backslashreplace").decode()
            raise ConfigError(
                f"data.path: {where}: column {column!r}: {half} is half of a surrogate pair and no text; remove it, or write both halves"
            ) from None


def _parquet(path: Path) -> Found:
    pa = _pyarrow(path)
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            yield from _batches(path, file.iter_batches())
    except pa.ArrowException as error:
        raise ConfigError(f"data.path: {path}: not a parquet file: {error}; write it again, or give .jsonl") from error


def _arrow(path: Path) -> Found:
    """A file of Arrow IPC (feather is one), or a stream, as datasets.save_to_disk writes it."""
    pa = _pyarrow(path)
    try:
        with pa.memory_map(str(path)) as file:
            try:
                reader = pa.ipc.open_file(file)
                batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
            except pa.ArrowInvalid:
                file.seek(0)
                batches = pa.ipc.open_stream(file)
            yield from _batches(path, batches)
    except pa.ArrowException as error:
        raise ConfigError(f"data.path: {path}: not an Arrow file: {error}; write it again, or give .jsonl") from error


def _batches(path: Path, batches: Any) -> Found:
    number = 0
    for part in batches:
        for row in part.to_pylist():
            yield f"{path}: row {number}", row
            number += 1


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
    except ModuleNotFoundError as error:
        raise ConfigError(f"data.path: {path}: reading it needs pyarrow (pip install pyarrow)") from error
    return pyarrow
