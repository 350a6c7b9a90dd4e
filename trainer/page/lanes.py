"""The timeline of a traced step: what each process of a run did when, read from its folder (trainer/cluster/traces.py writes it).

    steps(folder)        the steps that were traced
    told(folder, [20])   in words where their time went, line by line
    lanes(folder, 20)    {"step": 20, "seconds": 3.2, "lanes": [{"name": "policy-0", "node": "10.0.0.2", "kind": "rank", "error": 0.0,
                         "spans": [["forward", 0.01, 1.2, {"tokens": 812}], ...]}, ...], "words": [...], "complete": true}

Times are seconds since the step began. A span lies within another one or beside it, never across its border.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from .causes import causes, words
from .perfetto import file

__all__ = ["NoTimeline", "accounted", "causes", "chosen", "lanes", "perfetto", "read", "steps", "told"]

FOLDER = "traces"
MOST = 1000  # steps of one file
KINDS = ("driver", "rank", "engine", "environment", "reward", "weights", "checkpoint")  # from top to bottom
Span = list[Any]  # name, begin, end, numbers


class NoTimeline(ValueError):
    """There is none of that step, or it is damaged; the text says which there are."""


def steps(folder: Path) -> list[int]:
    """The traced steps of a run's folder, in order."""
    names = [file.name.removeprefix("step_").removesuffix(".jsonl") for file in (folder / FOLDER).glob("step_*.jsonl")]
    return sorted(int(name) for name in names if name.isdecimal())


def chosen(folder: Path, text: str | None) -> list[int]:
    """Steps of a text such as 3,20..22; those that were traced where there is none. Raises NoTimeline."""
    found: set[int] = set()
    for part in text.split(",") if text else ():
        match = re.fullmatch(r"\s*(\d{1,9})(?:\.\.(\d{1,9}))?\s*", part, re.ASCII)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last < first + MOST:
            raise NoTimeline(f"--steps {text}: {part!r} is not a step or a range such as 20..22 of at most {MOST}")
        found.update(range(first, last + 1))
    return sorted(found) if text else steps(folder)


def told(folder: Path, wanted: list[int]) -> list[str]:
    """A line for each step, and one for each cause that its time went into. Raises NoTimeline."""
    lines = []
    for step in (lanes(folder, step) for step in wanted):
        cut = "" if step["complete"] else ", which a kill cut short"
        lines += [f"step {step['step']}: {step['seconds']:.2f} s{cut}" + ("" if step["words"] else "; nothing stands out")]
        lines += [f"  {line}" for line in step["words"]]
    return lines


def lanes(folder: Path, step: int) -> dict[str, Any]:
    """Raises NoTimeline."""
    found = read(folder, step)
    return {**found, "words": words(found)}


def perfetto(folder: Path, wanted: list[int]) -> bytes:
    """These steps as a Chrome trace in gzip, which https://ui.perfetto.dev opens. Raises NoTimeline."""
    if not wanted:
        raise NoTimeline(f"{folder}: no step was traced; log.trace.steps says which are")
    return file([read(folder, step) for step in wanted], {step: profiles(folder, step) for step in wanted}, folder / FOLDER)


def read(folder: Path, step: int) -> dict[str, Any]:
    """`lanes` without its words, and with the time at which the step began. Raises NoTimeline."""
    rows = _rows(folder, step)
    ends = [row["end"] for row in rows if "end" in row]
    by_name: dict[str, dict[str, Any]] = {}
    for row in rows:
        if "spans" in row:
            facts = {"name": row["lane"], "node": row["node"], "kind": row["kind"], "error": row["error"], "spans": []}
            lane = by_name.setdefault(row["lane"], facts)
            lane["spans"] += row["spans"]
    seconds = ends[-1] if ends else max((span[2] for lane in by_name.values() for span in lane["spans"]), default=0.0)
    for lane in by_name.values():
        lane["spans"] = nested(lane["spans"], seconds)
    order = sorted(by_name.values(), key=lambda lane: (_place(lane["kind"]), _natural(lane["name"])))
    began = next((row["time"] for row in rows if "time" in row), 0.0)
    return {"step": step, "time": began, "seconds": seconds, "complete": bool(ends), "lanes": [lane for lane in order if lane["spans"]]}


def profiles(folder: Path, step: int) -> list[dict[str, Any]]:
    """Of torch's profiler: the file, the lane, and when the step began by the file's clock. Raises NoTimeline."""
    return [row for row in _rows(folder, step) if "torch" in row]


def nested(spans: list[Span], seconds: float) -> list[Span]:
    """Within 0 and `seconds`, in order, the outer ones first; none crosses another's border."""
    inside = [[name, max(0.0, begin), min(seconds, end), numbers] for name, begin, end, numbers in spans if end > 0 and begin < seconds]
    inside.sort(key=lambda span: (span[1], -span[2]))
    out: list[Span] = []
    around: list[Span] = []  # that are open
    for name, first, last, numbers in inside:
        begin = first
        while around and around[-1][2] <= begin:
            around.pop()
        while around and last > around[-1][2]:  # it goes on after the one that it began in
            begin = around.pop()[2]
        if last > begin:
            around.append([name, begin, last, numbers])
            out.append(around[-1])
    return sorted(out, key=lambda span: (span[1], -span[2]))


def accounted(lane: dict[str, Any], seconds: float) -> float:
    """The share of the step in which a lane has spans."""
    covered = end = 0.0
    for _, begin, last, _ in lane["spans"]:
        covered += max(0.0, last - max(begin, end))
        end = max(end, last)
    return covered / seconds if seconds else 0.0


def _there(folder: Path) -> str:
    known = ", ".join(map(str, steps(folder)))
    return f"it has those of {known}" if known else "it has none: log.trace.steps says which steps are traced"


def _rows(folder: Path, step: int) -> list[dict[str, Any]]:
    path = folder / FOLDER / f"step_{step}.jsonl"
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError:
        raise NoTimeline(f"{folder}: no timeline of step {step}; {_there(folder)}") from None
    rows = []
    for number, line in enumerate(lines[:-1], 1):  # what follows the last line's end was cut off by a kill
        try:
            rows.append(dict(json.loads(line)))
        except (ValueError, TypeError):
            raise NoTimeline(f"{path}:{number}: not a line of a timeline; trace the step again, or remove the file") from None
    return rows


def _place(kind: str) -> int:
    return KINDS.index(kind) if kind in KINDS else len(KINDS)


def _natural(name: str) -> tuple[str, int]:
    """rollout-10 comes after rollout-9."""
    word, _, number = name.rpartition("-")
    return (word, int(number)) if number.isdecimal() else (name, 0)
