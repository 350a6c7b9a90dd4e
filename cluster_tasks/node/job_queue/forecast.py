"""The planner played forward: when each job would start and end, and what that costs. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from .jobs import ENDED, TAKES, WAITS, Record
from .planner import MIN_RUN, plan
from .shares import Cluster, Owner, credited

HORIZON = 30 * 86400.0  # seconds
MOST_STEPS = 5000
PAUSE_SECONDS = 60.0  # of a job whose pauses nobody has seen


def forecast(
    cluster: Cluster,
    records: Sequence[Record],
    owners: Mapping[str, Owner],
    now: float,
    min_run: float = MIN_RUN,
    hourly: float | None = None,
) -> dict[str, Any]:
    """Of each job: `start` and `end` in seconds from now, `usd` from now on; None where nobody knows how long it, or one before it, takes.

    Jobs whose length nobody knows run on to the end of the forecast. A smaller size takes longer in proportion.
    """
    left = {each.name: each.remaining for each in records}
    found: dict[str, dict[str, float | None]] = {
        each.name: {"start": 0.0 if each.state in TAKES else None, "end": None, "usd": None}
        for each in records
        if each.state in (*WAITS, *TAKES)
    }
    paid = dict.fromkeys(found, 0.0)
    playing = {each.name: each for each in records if each.name in found}
    held, time = dict(owners), now
    for _ in range(MOST_STEPS):
        moves = [each for each in plan(cluster, [*playing.values()], held, time, min_run) if each.action != "wait"]
        for move in moves:
            record = playing[move.job]
            if move.action == "start":
                playing[move.job] = replace(record, state="running", size=move.size, started=time, since=time)
                if found[move.job]["start"] is None:
                    found[move.job]["start"] = time - now
            elif move.after == "held":
                del playing[move.job]
            else:
                playing[move.job] = replace(record, state="pausing", since=time)
        ends = [ahead for record in playing.values() if (ahead := _ahead(record, left, time)) is not None]
        waits = any(record.state in WAITS for record in playing.values())
        nexts = [*ends, *([max(min_run, 60.0)] if waits else [])]
        if not nexts or time + min(nexts) > now + HORIZON:
            break
        step = max(1e-3, min(nexts))
        held, time = credited(cluster, [*playing.values()], held, step), time + step
        for name, record in [*playing.items()]:
            if record.state in TAKES and hourly:
                part = record.gpus / cluster.gpus if cluster.gpus else record.cpus / cluster.cpus if cluster.cpus else 0.0
                paid[name] += hourly * part * step / 3600
            if record.state == "pausing" and time - record.since >= _pause(record) - 1e-6:
                playing[name] = replace(record, state="paused", size=None, since=time)
            elif record.state == "running" and (remaining := left[name]) is not None:
                left[name] = remaining - step * _speed(record)
                if left[name] <= 1e-6:  # type: ignore[operator]
                    found[name]["end"], found[name]["usd"] = time - now, paid[name] if hourly else None
                    del playing[name]
    ended = sum(each.state in ENDED for each in records)
    return {"jobs": found, "ended": ended, "until": time - now}


def _speed(record: Record) -> float:
    """Of the size that it runs at; 1 at the one that its seconds are of."""
    whole = record.job.sizes[0]
    return record.gpus / whole.gpus if whole.gpus else record.cpus / whole.cpus if whole.cpus else 1.0


def _pause(record: Record) -> float:
    return record.pause_seconds or PAUSE_SECONDS


def _ahead(record: Record, left: Mapping[str, float | None], time: float) -> float | None:
    """Seconds until something changes with it."""
    if record.state == "pausing":
        return max(0.0, record.since + _pause(record) - time)
    remaining = left[record.name]
    return remaining / max(_speed(record), 1e-9) if record.state == "running" and remaining is not None else None
