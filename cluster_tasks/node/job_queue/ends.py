"""What a job is after Ray has said that it ended. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .jobs import Record

CRASHES = 3  # of a driver in a row, without a step in between
STOPPED = 143  # exit code of a run that was asked to stop, and has saved


def ended(record: Record, job: Mapping[str, Any], took: float, stop_seconds: float, leaving: bool) -> tuple[Record, str, str]:
    """The record, its next state, and why. `job`: as Ray describes it; `took`: seconds in its present state; `leaving`: the head
    stops all."""
    code, said = job.get("driver_exit_code"), last_line(job.get("message") or "")
    if job["status"] == "SUCCEEDED":
        return record, "succeeded", "its command has ended with 0"
    if record.state == "pausing":
        late = code == -9 and took >= stop_seconds - 1
        how = "saved" if code in (STOPPED, None, 0) and record.job.saves else f"ended with {code}"
        how = f"was killed: it did not end within {stop_seconds:g} s" if late else how
        paused = replace(record, pauses=record.pauses + 1, pause_seconds=took)
        return paused, record.after, f"{record.reason}; it {how} after {took:.0f} s"
    if leaving:
        return record, "paused", "the cluster is stopping"
    if job["status"] == "STOPPED" or code == STOPPED:
        return record, "held", "stopped by hand, or by itself; flotilla queue STACK release continues it"
    dead = code is None or code < 0 or code > 128  # by a signal, or with its node
    if dead and record.crashes < CRASHES:
        again = replace(record, crashes=record.crashes + 1)
        return again, "paused", f"its driver died ({code}), {again.crashes} of {CRASHES} in a row: {said}"
    return record, "failed", f"exit code {code}: {said}"


def last_line(message: str) -> str:
    """Of what Ray says of a job that failed: its driver's last words."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"
