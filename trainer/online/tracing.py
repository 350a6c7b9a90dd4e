"""Which steps of a run are traced, and how the driver gets what its processes recorded. Runs in the driver."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from trainer.cluster import actors, profiles, spans
from trainer.cluster.launcher import Launcher
from trainer.cluster.spans import Here
from trainer.cluster.traces import Clocks, Traces, measure
from trainer.configs.sections import TraceConfig

PATIENCE = 0.2  # seconds for processes to say what their clocks show; one that is at work answers later
COLLECT = 1.0  # seconds between two looks at what processes have published
END = 5.0  # seconds for them to hand on the rest when the run ends
ASIDE = {"rewards": "reward", "weights": "weights", "checkpoints": "checkpoint"}  # lanes of the driver's process besides its own


class Tracing:
    """A context manager: leaving it writes the last traced step to its end."""

    def __init__(self, config: TraceConfig, folder: Path, launcher: Launcher, done: int):
        self.config, self.launcher = config, launcher
        self.traces, self.clocks, self.boot = Traces(folder, done), Clocks(), spans.boot()
        self.prefix = launcher.spans
        self.on = self.profiled = False
        self.nodes: dict[str, Here] = {}
        self.asked: dict[Any, tuple[str, float]] = {}  # answers to `record` that are still to come: of whom, and when it was asked
        self.lane = spans.new_lane("driver", "driver")
        self.guard = threading.RLock()  # of all this
        self.thread: threading.Thread | None = None
        self.ended = threading.Event()
        self.others = [spans.new_lane(name, kind) for name, kind in ASIDE.items()]

    def __enter__(self) -> Self:
        self._on = spans.on_lane(self.lane)
        self._on.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            with self.guard, suppress(*self.launcher.errors):  # what a run fails with is reported, not what it cannot trace any more
                self._close(END if kind is None else PATIENCE)
            self.ended.set()
            if self.thread:
                self.thread.join(END)
        finally:
            self._on.__exit__(None, None, None)
            spans.LANES.clear()

    def ahead(self, step: int) -> None:
        """Before rollout engines are asked for anything of `step`: have all record, where it is traced, or the next one is, which they may
        begin early."""
        if not (self.config.traced(step) or self.config.traced(step + 1)):
            return
        with self.guard:
            self._record(on=True, profile=self.profiled or self.config.traced(step))
        if self.thread is None:
            self.thread = threading.Thread(target=self._look, name="tracing", daemon=True)
            self.thread.start()

    def begin(self, step: int) -> None:
        """The step before has ended, if there was one."""
        with self.guard:
            now = time.perf_counter()
            self._end(now)
            if self.config.traced(step):
                self.traces.begin(step, now)
                self.lane.since = now
            elif self.on:
                self._record(on=self.config.traced(step + 1), profile=False)
            if self.prefix is None:
                self._collect()

    def end(self) -> None:
        """The last step has ended; what follows is of none."""
        with self.guard:
            self._end(time.perf_counter())

    def _look(self) -> None:
        """In a thread: what is published does not gather in Ray's store while a step takes minutes."""
        while not self.ended.wait(COLLECT):
            with self.guard:
                self._collect()

    def _end(self, now: float) -> None:
        for step, (_, end) in [*self.traces.steps.items()]:
            if end is None:
                self.lane.lap("end of the step")
                self.traces.end(step, now)

    def _close(self, seconds: float) -> None:
        self._end(time.perf_counter())
        if not (self.on or self.asked or self.traces.steps):  # the last are written late: the thread looks once in COLLECT
            return
        if self.on:
            self._record(on=False, profile=False)
        deadline = time.monotonic() + seconds
        while self.asked and time.monotonic() < deadline:
            self._answers(max(0.0, min(PATIENCE, deadline - time.monotonic())))
        self._collect()

    def _record(self, *, on: bool, profile: bool) -> None:
        """Tell all processes, and hear what their clocks show."""
        parts = [part for part in self.config.parts if part != "spans"] if profile else []
        if self.prefix is None:  # all that is in this process is profiled at once
            if profile != self.profiled and (trace := profiles.switch(profile, {*self.config.parts}, self.lane.name)):
                self.traces.profile(self.lane.name, trace, 0.0)
            parts = []
        self.profiled = profile
        for lane in (self.lane, *self.others):
            lane.switch(on)
        known, self.on = self.on == on and all(here.boot == self.boot for here in self.nodes.values()), on
        for name, actor in [*self.launcher.recorded.items()]:
            self.asked[actor.record.remote(on, name, parts, self.prefix)] = name, time.perf_counter()
        self._answers(0.0 if known else PATIENCE)
        for name, here in self.nodes.items():
            if on and here.boot != self.boot and name in self.launcher.recorded:
                measure(self.clocks, name, lambda actor=self.launcher.recorded[name]: self._shown(actor))

    def _shown(self, actor: Any) -> float | None:
        ref = actor.here.remote()
        try:
            return self.launcher.get(ref).now if self.launcher.done([ref], PATIENCE)[0] else None
        except self.launcher.errors:
            return None

    def _answers(self, seconds: float) -> None:
        if not self.asked:
            return
        done, _ = self.launcher.done([*self.asked], seconds)
        for ref in done:
            name, sent = self.asked.pop(ref)
            try:
                here, profile = self.launcher.get(ref)
            except self.launcher.errors as error:
                if not self.launcher.is_death(error):  # of one that has died says who needs it
                    _warn(f"{name} does not record: {error}")
                continue
            self.nodes[name] = here
            self.clocks.ping(name, sent, here.now, time.perf_counter())
            if profile and self.traces.steps:
                self.traces.profile(name, profile, self._offset(name, here.boot)[0])

    def _collect(self) -> None:
        """Write what has been recorded; once all have ended to record, the steps get no more."""
        self._answers(0.0)
        found = spans.take(actors.address())
        if self.prefix and (self.on or self.traces.steps):
            try:
                found += spans.published(self.prefix)
            except self.launcher.errors as error:
                _warn(f"Ray does not hand on what its processes recorded: {error}")
        for batch in found:
            self.traces.add(batch, *self._offset(batch.lane, batch.boot))
        if not self.on and not self.asked:
            self.traces.close()

    def _offset(self, name: str, boot: str) -> tuple[float, float]:
        return (0.0, 0.0) if boot == self.boot else self.clocks.offset(name, time.perf_counter())


def _warn(text: str) -> None:
    print(f"warning: log.trace: {text.strip().splitlines()[-1]}", file=sys.stderr, flush=True)
