"""metrics.jsonl of a run, read as it grows: columns of numbers, and curves of as many points as a screen has."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE = "metrics.jsonl"
NAN = math.nan
CHUNK = 2**22  # bytes
POINTS = 600  # of a curve
MOST_BROKEN = 200  # steps of a metric that are shown as not finite


class Metrics:
    """The rows of one run, by column; `read` takes what is new. A resumed run replaces the file, which is then read again."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / FILE
        self._forget()

    def _forget(self) -> None:
        self.inode, self.at, self.rest = -1, 0, b""
        self.steps = array("q")
        self.columns: dict[str, array[float]] = {}
        self.broken: dict[str, list[int]] = {}  # steps whose number was not finite
        self.damaged: list[int] = []  # numbers of lines that are no JSON objects with a step
        self.lines = 0

    def read(self) -> Metrics:
        """Itself. Without the file it has no rows; a line that is not finished yet waits for its end."""
        try:
            with self.file.open("rb") as stream:
                status = self.file.stat()
                if status.st_ino != self.inode or status.st_size < self.at:
                    self._forget()
                    self.inode = status.st_ino
                stream.seek(self.at)
                while chunk := stream.read(CHUNK):
                    self.at += len(chunk)
                    *lines, self.rest = (self.rest + chunk).split(b"\n")
                    for line in lines:
                        self._add(line)
        except OSError:
            self._forget()
        return self

    def _add(self, line: bytes) -> None:
        self.lines += 1
        try:
            row = json.loads(line)
            step = row.pop("step")
        except (ValueError, KeyError, AttributeError):
            self.damaged.append(self.lines)
            return
        if not (self.steps and self.steps[-1] == step):  # else an evaluation that follows its step
            self.steps.append(step)
            for values in self.columns.values():
                values.append(NAN)
        for key, value in row.items():
            if key not in self.columns:
                self.columns[key] = array("d", [NAN]) * len(self.steps)
            if isinstance(value, int | float):
                self.columns[key][-1] = value
            elif value is None and len(broken := self.broken.setdefault(key, [])) < MOST_BROKEN:
                broken.append(step)

    @property
    def size(self) -> int:
        """Bytes of memory."""
        return 8 * len(self.steps) * (1 + len(self.columns))

    def keys(self) -> list[str]:
        """Of metrics that are not 0 throughout."""
        return [key for key, values in self.columns.items() if key in self.broken or any(v and not math.isnan(v) for v in values)]

    def last(self, key: str) -> float | None:
        """The newest value of it."""
        return next((value for value in reversed(self.columns.get(key, ())) if not math.isnan(value)), None)

    def row(self, step: int) -> dict[str, float]:
        """All numbers of a step."""
        place = next((i for i in range(len(self.steps) - 1, -1, -1) if self.steps[i] == step), None)
        if place is None:
            return {}
        return {key: values[place] for key, values in self.columns.items() if not math.isnan(values[place])}

    def pairs(self, key: str, begin: int = 0, end: int | None = None) -> Iterator[tuple[int, float]]:
        """Steps and values of a metric where it has one, within `begin` and `end`."""
        for step, value in zip(self.steps, self.columns.get(key, ()), strict=False):
            if not math.isnan(value) and step >= begin and (end is None or step <= end):
                yield step, value

    def curve(self, key: str, points: int = POINTS, begin: int = 0, end: int | None = None) -> dict[str, Any]:
        """At most `points` of steps and values: means where there are more, with the least and the largest, so that nothing is hidden."""
        found = [*self.pairs(key, begin, end)]
        broken = {"broken": self.broken[key]} if key in self.broken else {}
        if len(found) <= points:
            return {"step": [step for step, _ in found], "value": [number(value) for _, value in found]} | broken
        each = math.ceil(len(found) / points)
        parts = [found[i : i + each] for i in range(0, len(found), each)]
        values = [[value for _, value in part] for part in parts]
        return {
            "step": [part[len(part) // 2][0] for part in parts],
            "value": [number(sum(some) / len(some)) for some in values],
            "low": [number(min(some)) for some in values],
            "high": [number(max(some)) for some in values],
        } | broken


def number(value: float) -> float | None:
    """Rounded to what a screen shows; None of what is none."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def tail(folder: Path, size: int = 2**15) -> dict[str, Any]:
    """The last whole row, with only the end of the file read: for lists of runs. An evaluation's row is merged with its step's."""
    try:
        with (folder / FILE).open("rb") as stream:
            stream.seek(max(0, stream.seek(0, 2) - size))
            lines = stream.read().split(b"\n")
    except OSError:
        return {}
    found: dict[str, Any] = {}
    for line in reversed(lines[:-1]):
        try:
            row = json.loads(line)
            same = not found or row["step"] == found["step"]
        except (ValueError, KeyError, TypeError):
            break
        if not same:
            break
        found = row | found
        if any(not key.startswith("eval_") and key != "step" for key in row):
            break
    return found
