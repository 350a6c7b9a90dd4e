"""Traced steps as Chrome trace events, which Perfetto (https://ui.perfetto.dev) and chrome://tracing open: a process for each lane.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

MARK = "flotilla clock "  # torch's event whose name says when it was (trainer/cluster/profiles.py)
MICRO = 1e6
OWN = 0  # the thread of our spans; those of torch's profiler have other numbers
COUNTED = {"running": "sequences at work", "waiting": "requests waiting"}
Event = dict[str, Any]


class Part(NamedTuple):
    """A step in a profile: when it began by the profile's clock and, in microseconds, in the file that is made; and its seconds."""

    begin: float
    at: float
    seconds: float


def file(steps: list[dict[str, Any]], profiles: dict[int, list[dict[str, Any]]], folder: Path) -> bytes:
    """`steps` as lanes.read returns them; `profiles`: by step, rows that name files of torch's profiler in `folder`."""
    begin = min((step["time"] for step in steps), default=0.0)
    names = {(lane["name"], lane["node"]): lane["kind"] for step in steps for lane in step["lanes"]}
    numbers = {name: number for number, (name, _) in enumerate(names, 1)}
    events = [event for (name, node), kind in names.items() for event in _process(numbers[name], name, node, kind)]
    of_file: dict[tuple[str, str], list[Part]] = defaultdict(list)
    for step in steps:
        at = (step["time"] - begin) * MICRO
        for lane in step["lanes"]:
            if lane["kind"] == "driver":
                label = f"step {step['step']}"
                events.append(
                    {"ph": "X", "name": label, "pid": numbers[lane["name"]], "tid": OWN, "ts": at, "dur": step["seconds"] * MICRO}
                )
            events += _spans(lane, numbers[lane["name"]], at)
        for row in profiles.get(step["step"], []):
            of_file[row["torch"], row["lane"]].append(Part(row["begin"], at, step["seconds"]))
    threads: dict[str, dict[tuple[str, str], int]] = defaultdict(dict)  # by lane: the numbers here of those that torch has
    for (name, lane), parts in of_file.items():
        if lane in numbers:
            events += _torch(folder / name, parts, numbers[lane], threads[lane])
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))
    return gzip.compress(text.encode(), 6, mtime=0)


def _process(number: int, name: str, node: str, kind: str) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": number, "tid": OWN, "args": {"name": f"{name} ({node})" if node else name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": number, "tid": OWN, "args": {"sort_index": number}}
    yield {"ph": "M", "name": "thread_name", "pid": number, "tid": OWN, "args": {"name": kind}}


def _spans(lane: dict[str, Any], number: int, at: float) -> Iterator[Event]:
    for name, begin, end, values in lane["spans"]:
        place = {"pid": number, "tid": OWN, "ts": round(at + begin * MICRO, 3)}
        yield {"ph": "X", "name": name, "cat": lane["kind"], **place, "dur": round((end - begin) * MICRO, 3), "args": values}
        if name in ("decode", "prefill") and (counts := {said: values[key] for key, said in COUNTED.items() if key in values}):
            yield {"ph": "C", "name": "requests", **place, "args": counts}


def _torch(file: Path, parts: list[Part], number: int, threads: dict[tuple[str, str], int]) -> Iterator[Event]:
    """What torch saw in these steps, on threads of the lane's own process. Nothing where the file is gone or damaged."""
    try:
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        mark = next(event for event in events if str(event.get("name", "")).startswith(MARK))
        shown = float(mark["name"].removeprefix(MARK)) - float(mark["ts"]) / MICRO  # what to add to `ts` to have the profile's clock
    except (OSError, EOFError, ValueError, KeyError, StopIteration):
        return
    names = {}
    for event in events:
        if event.get("ph") == "M" and event["name"] in ("process_name", "thread_name"):
            names[event["name"], str(event["pid"]), str(event.get("tid", 0))] = event["args"]["name"]
    for event in events:
        if "ts" not in event or event is mark:
            continue
        clock = float(event["ts"]) / MICRO + shown
        part = next((part for part in parts if 0 <= clock - part.begin < part.seconds), None)
        if part is None:
            continue
        key = str(event["pid"]), str(event.get("tid", 0))
        if key not in threads:
            threads[key] = thread = OWN + 1 + len(threads)
            label = " ".join(filter(None, (names.get(("process_name", key[0], "0")), names.get(("thread_name", *key)) or key[1])))
            yield {"ph": "M", "name": "thread_name", "pid": number, "tid": thread, "args": {"name": f"torch: {label}"}}
        moved = {**event, "pid": number, "tid": threads[key], "ts": round(part.at + (clock - part.begin) * MICRO, 3)}
        if "id" in event:  # of arrows: those of another process have the same numbers
            moved["id"] = f"{number}-{event['id']}"
        yield moved
