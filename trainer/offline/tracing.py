"""The timeline of ranks that nobody drives: each records its own lane, and rank 0 writes them all. Runs in the ranks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Self

from trainer.cluster import actors, profiles, spans
from trainer.cluster.traces import Clocks, Traces
from trainer.configs.timeline import TraceConfig
from trainer.offline.saver import barrier, gather

PINGS = 5


class Tracing:
    """A context manager. `begin` of a step after a traced one is collective, and so is leaving it without an error."""

    def __init__(self, config: TraceConfig, folder: Path, rank: int, world: int, done: int):
        self.config, self.rank, self.world = config, rank, world
        self.traces = Traces(folder, done) if rank == 0 else None
        self.lane = spans.new_lane(f"rank-{rank}", "rank")
        self.clocks = Clocks()
        self.machines: list[str] = []  # of the ranks
        self.begun: tuple[int, float] | None = None
        self.parts = set(config.parts) & {"torch", "nsys"}

    def __enter__(self) -> Self:
        self._on = spans.on_lane(self.lane)
        self._on.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._end(more=False)
        finally:
            self._on.__exit__(None, None, None)
            spans.LANES.clear()

    def begin(self, step: int) -> None:
        """The step before has ended, if there was one."""
        traced = self.config.traced(step)
        self._end(more=traced)
        if not traced:
            return
        if not self.lane.on:
            self.lane.switch(True)  # before rank 0 takes the step's begin, which another rank may be slow to reach
            self._compare_clocks()
            profiles.switch(True, self.parts, self.lane.name)
        self.lane.lap("begin of the step")  # on another rank it may have begun by now
        self.begun = step, self.lane.since
        if self.traces:
            self.traces.begin(*self.begun)

    def end(self) -> None:
        """The last step has ended; what follows is of none. Collective."""
        self._end(more=False)

    def _end(self, *, more: bool) -> None:
        if self.begun is None:
            return
        self.lane.lap("end of the step")
        barrier(self.world)
        self.lane.lap("waiting")
        (step, _), self.begun, now = self.begun, None, self.lane.since
        if not more:
            barrier(self.world)  # rank 0 has taken the step's end when the others leave it
            self.lane.lap("waiting")
        profile = None if more else profiles.switch(False, self.parts, self.lane.name)
        self.lane.switch(more)
        found = gather((spans.take(actors.address()), profile), self.world)
        if self.traces is None:
            return
        self.traces.end(step, now)
        for rank, (batches, trace) in enumerate(found):
            name = f"rank-{rank}"
            near = self.machines[rank] == self.machines[0]
            offset, error = (0.0, 0.0) if near else self.clocks.offset(name, now)
            for batch in batches:
                self.traces.add(batch, offset, error)
            if trace:
                self.traces.profile(name, trace, offset)
        if not more:
            self.traces.close()

    def _compare_clocks(self) -> None:
        """Rank 0 asks all at once: what another's clock shows between two barriers lies between rank 0's times before and after them."""
        self.machines = gather(spans.boot(), self.world)
        for _ in range(PINGS if len(set(self.machines)) > 1 else 0):
            sent = time.perf_counter()
            barrier(self.world)
            shown = time.perf_counter()
            barrier(self.world)
            back = time.perf_counter()
            for rank, other in enumerate(gather(shown, self.world)):
                self.clocks.ping(f"rank-{rank}", sent, other, back)
