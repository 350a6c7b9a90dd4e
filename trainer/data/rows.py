"""Rows of files, of the hub or of a function. No torch: paths, columns and functions are checked before it is imported."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.cli.import_path import check_args, find
from trainer.configs.data import DataConfig
from trainer.data import files, hub
from trainer.errors import ConfigError

Row = dict[str, Any]
RETURNED: dict[Any, Collection[Any]] = {}  # all rows of functions that return them at once: preflight and the run call those once


def check(config: DataConfig, *, answers: bool = True) -> None:
    """That the data can be read, and the columns of its first row. Raises ConfigError."""
    where, columns = first_row(config)
    for setting, name in config.columns(answers=answers).items():
        column(columns, name, setting, where)


@contextmanager
def of_set(section: str) -> Iterator[None]:
    """Errors about the data inside are of evals.NAME or data.mix.NAME, with its settings in place of data's; "" leaves them alone."""
    try:
        yield
    except ConfigError as error:
        if not section:
            raise
        text = re.sub(r"\bdata\.(?=(path|args|split|subset|revision|prompt|answer)\b)", f"{section}.", str(error))
        raise ConfigError(text if text.startswith(section) else f"{section}: {text}") from error


def first_row(config: DataConfig) -> tuple[str, Row]:
    """Of `read_rows`. Raises ConfigError where there is none."""
    for where, columns in read_rows(config):
        return where, columns
    raise no_rows(config)


def no_rows(config: DataConfig) -> ConfigError:
    return ConfigError(f"data.path: {config.path} has no rows; at least one is needed")


def read_rows(config: DataConfig) -> Iterator[tuple[str, Row]]:
    """Each row with a word on where it stands: file:line, or a number. Raises ConfigError."""
    path = config.path
    if config.function():
        yield from _function(path, config.args)
    elif config.may_be_hub() and not Path(path).exists():
        yield from hub.rows(config)
    else:
        for file in files.shards(path):
            for where, row in files.rows(file):
                yield where, _row(row, where)


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


def told(sets: Mapping[str, DataConfig]) -> Iterator[str]:
    """What functions say of the rows that they gave, by `function.about(**args)` where that is there; of each set with its name."""
    for name, config in sets.items():
        about = getattr(find(config.path, "data.path"), "about", None) if config.function() else None
        if about:
            yield f"{name}: {about(**config.args)}" if name else f"{about(**config.args)}"


def _row(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise ConfigError(f"data.path: {where}: a row is a JSON object of columns, not a {type(row).__name__}")
    return {**row, "answer": row["reward_model"]["ground_truth"]} if is_of_verl(row) else row


def is_of_verl(row: Row) -> bool:
    """Whether its answer is reward_model.ground_truth, as in the data sets of verl."""
    model = row.get("reward_model")
    truth = model.get("ground_truth") if isinstance(model, dict) else None
    return truth is not None and ("answer" not in row or row["answer"] is truth)


def column(row: Row, name: str, setting: str, where: str) -> Any:
    if row.get(name) is None:
        if name in row:
            raise ConfigError(f"{setting}: {where}: column {name!r} is empty; fill it in, or leave the row out")
        columns = ", ".join(map(str, row)) or "none"
        raise ConfigError(f"{setting}: {where}: column {name!r} is missing; the columns are {columns}; set {setting} to one, or add it")
    return row[name]
