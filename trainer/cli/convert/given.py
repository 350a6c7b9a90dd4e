"""What another trainer was given, and what has been made of it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.cli import yaml_io
from trainer.errors import ConfigError

SECRET = re.compile(r"(^|[._])(token|secret|password|api_key)$")  # names of settings whose values no terminal shows


@dataclass
class Given:
    """Their settings by name. `take` reads one, with their default where it was not given, and marks it as read."""

    values: dict[str, Any]
    defaults: dict[str, Any] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)

    def take(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        value = self.values.get(key, self.defaults.get(key, default))
        return yaml_io.load(value) if isinstance(value, str) and value.strip() else value

    def number(self, key: str) -> Any:
        """Raises ConfigError for what is none, such as a variable that the script leaves to its environment."""
        value = self.take(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{key}={value}: no number; put the variables in it at the beginning of the script, such as NNODES=2")
        return value

    def text(self, key: str, default: str = "") -> str:
        """As it was written."""
        self.read.add(key)
        value = self.values.get(key, self.defaults.get(key, default))
        return "" if value is None else str(value)

    def has(self, key: str) -> bool:
        return key in self.values

    def unread(self) -> dict[str, Any]:
        return {key: value for key, value in self.values.items() if key not in self.read}


@dataclass
class Made:
    """Settings by their full names, in the order in which they are written; `checks` are for a person to look at."""

    entry: str  # of trainer.<entry>
    settings: dict[str, Any] = field(default_factory=dict)
    checks: list[str] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)  # their setting as it was given, and why
    not_needed: list[tuple[str, str]] = field(default_factory=list)

    def set(self, key: str, value: Any, ours: Any = None) -> None:
        """Unless it is `ours`, the default here."""
        if value is not None and value != ours:
            self.settings[key] = value

    def sort(self, given: Given, not_needed: dict[str, str], no_counterpart: dict[str, str]) -> None:
        """What was not read goes where a table has its name, or the beginning of it."""
        for key, value in given.unread().items():
            shown = f"{key}={'***' if SECRET.search(key) else value}"
            if (why := _named(not_needed, key)) is not None:
                self.not_needed.append((shown, why))
            else:
                self.left_out.append((shown, _named(no_counterpart, key) or "no setting here does this"))

    def sections(self) -> dict[str, Any]:
        nested: dict[str, Any] = {}
        for key, value in self.settings.items():
            *around, last = key.split(".")
            inner = nested
            for name in around:
                inner = inner.setdefault(name, {})
            inner[last] = value
        return nested


def _named(table: dict[str, str], key: str) -> str | None:
    around = [key]
    while "." in around[-1]:
        around.append(around[-1].rpartition(".")[0])
    return next((table[name] for name in around if name in table), None)


def listed(text: str) -> list[str]:
    """One path, or several as a list in brackets."""
    value = yaml_io.load(text) if text.startswith("[") else text
    return [str(each) for each in value] if isinstance(value, list) else [str(value)] if value else []


def sources(made: Made, paths: list[str], key: str = "data") -> None:
    """data.path, or data.mix where they are several, whose rows are drawn by weight here and one after the other there."""
    if len(paths) == 1:
        made.set(f"{key}.path", paths[0])
    elif paths:
        made.set(f"{key}.mix", {name: {"path": path} for name, path in named(paths).items()})
        made.checks.append(f"{key}.mix: its sources are drawn from equally; set each weight to its number of rows to have them as before")


def named(paths: list[str]) -> dict[str, str]:
    """Each by a name of its own: the file's, or that of its folder where files have the same."""
    stems = [Path(path).stem for path in paths]
    found: dict[str, str] = {}
    for path, stem in zip(paths, stems, strict=True):
        name = stem if stems.count(stem) == 1 and stem not in ("train", "test", "val", "validation") else f"{Path(path).parent.name}_{stem}"
        clean = "".join(letter if letter.isalnum() or letter in "_-" else "_" for letter in name).lstrip("0123456789-_") or "set"
        found[clean if clean not in found else f"{clean}_{len(found)}"] = path
    return found


def count_rows(paths: list[str]) -> int | None:
    """Of parquet and JSON Lines files that are here; None where one is not."""
    total = 0
    for path in paths:
        file = Path(path).expanduser()
        if not file.is_file():
            return None
        if file.suffix == ".parquet":
            import pyarrow.parquet

            total += pyarrow.parquet.ParquetFile(file).metadata.num_rows
        elif file.suffix == ".jsonl":
            total += sum(1 for line in file.open() if line.strip())
        else:
            return None
    return total


def steps(made: Made, epochs: float, batch: int, paths: list[str], rows: int | None, how: str) -> int | None:
    """Steps of so many epochs; where nobody knows how many rows there are, `trainer.steps` is a text, which no start takes."""
    known = rows or count_rows(paths)
    if known is None:
        made.settings["trainer.steps"] = f"{how} x ROWS / {batch}"
        made.checks.append(f"trainer.steps: write {how} x the number of rows / {batch}; --rows N computes it")
        return None
    made.settings["trainer.steps"] = found = max(1, math.floor(epochs * (known // batch if known >= batch else 1)))
    return found


def one_gpu(parts: int) -> str:
    """Of colocated engines that have several."""
    return (
        f"rollout.tensor_parallel: {parts} GPUs for an engine there; one that takes turns with a rank has 1 here. "
        "A model that does not fit wants placement.colocate=false, and GPUs for rollout.engines beside placement.ranks"
    )
