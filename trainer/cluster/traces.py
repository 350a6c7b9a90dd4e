"""traces/ of a run's folder: a file of each traced step, with the spans of all its processes. Runs in the driver, or in rank 0.

    step_20.jsonl:
    {"step": 20, "time": 1790000000.0}
    {"lane": "policy-0", "kind": "rank", "node": "10.0.0.2", "error": 0.0, "spans": [[NAME, BEGIN, END, NUMBERS], ...]}
    {"end": 3.2}

    step_20.policy-0.1.torch.json.gz: what torch's profiler saw of that rank until the end of step 20, the first such file

Times are seconds since the step began, by the driver's clock; `error` is by how much those of a lane may be off. Lines are appended as
spans come, so a run that is killed leaves what it has recorded. A run that does a step again writes its file anew.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.cluster.spans import Batch

FOLDER = "traces"
DRIFT = 20e-6  # seconds per second that two clocks may differ by, as those of servers without NTP do


class Traces:
    """`done`: steps in the checkpoint that is resumed; what is there of later ones goes. A full disk ends no run."""

    def __init__(self, folder: Path, done: int):
        self.folder = folder / FOLDER
        self.profiles = 0
        self.steps: dict[int, tuple[float, float | None]] = {}  # begin and end of those that still may get spans
        for file in self.folder.glob("step_*"):
            if (number := file.name[5:].partition(".")[0]).isdecimal() and int(number) > done:
                file.unlink(missing_ok=True)

    def begin(self, step: int, at: float) -> None:
        self.steps[step] = at, None
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file(step).write_text("")
        self._add(step, {"step": step, "time": time.time()})

    def end(self, step: int, at: float) -> None:
        """It may get spans of before until it is closed."""
        begin, _ = self.steps[step]
        self.steps[step] = begin, at
        self._add(step, {"end": round(at - begin, 6)})

    def close(self) -> None:
        """What comes from now on is of no step until now."""
        self.steps = {step: (begin, end) for step, (begin, end) in self.steps.items() if end is None}

    def add(self, batch: Batch, offset: float, error: float) -> None:
        """Spans, to the steps that they touch. `offset`: how much later that process's clock shows the same moment than the driver's."""
        for step, (begin, end) in self.steps.items():
            spans = [
                [name, round(first - offset - begin, 6), round(last - offset - begin, 6), numbers]
                for name, first, last, numbers in batch.spans
                if last - offset > begin and (end is None or first - offset < end)
            ]
            if spans:
                self._add(step, {"lane": batch.lane, "kind": batch.kind, "node": batch.node, "error": round(error, 6), "spans": spans})

    def profile(self, lane: str, trace: bytes, offset: float) -> None:
        """Of torch, compressed; in each line of a step is when that step began by the clock of the trace."""
        with suppress(OSError):
            self.profiles += 1
            file = self.folder / f"step_{max(self.steps)}.{lane}.{self.profiles}.torch.json.gz"
            file.write_bytes(trace)
            for step, (begin, _) in self.steps.items():
                self._add(step, {"torch": file.name, "lane": lane, "begin": begin + offset})

    def _file(self, step: int) -> Path:
        return self.folder / f"step_{step}.jsonl"

    def _add(self, step: int, row: dict[str, Any]) -> None:
        with suppress(OSError), self._file(step).open("a", encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")


class Clocks:
    """How much the clocks of other machines differ from this process's: by pings, of which the best counts until drift has outdone it."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[float, float, float]] = {}  # by process: offset, error, when it was measured

    def ping(self, name: str, sent: float, shown: float, back: float) -> None:
        """It was asked at `sent`, showed `shown`, and its answer was here at `back`."""
        error = (back - sent) / 2
        _, known = self.offset(name, back)
        if error <= known:
            self.found[name] = shown - (sent + back) / 2, error, back

    def offset(self, name: str, now: float) -> tuple[float, float]:
        """Seconds, and by how much they may be off; that is infinite where nobody knows."""
        if name not in self.found:
            return 0.0, float("inf")
        offset, error, at = self.found[name]
        return offset, error + DRIFT * (now - at)


def measure(clocks: Clocks, name: str, ask: Callable[[], float | None], times: int = 5) -> None:
    """Ping a process; `ask` returns what its clock shows, None where it does not answer in time."""
    for _ in range(times):
        sent = time.perf_counter()
        shown = ask()
        if shown is None:
            return
        clocks.ping(name, sent, shown, time.perf_counter())
