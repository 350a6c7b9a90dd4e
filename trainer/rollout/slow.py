"""Rollout engines that are far slower than the others, in rollout.mode=async: their requests are asked of others too.

An engine is slow where a step takes it more than `rollout.slow` times as long as a typical other engine, over LEAST seconds of work. A call
that does not return is work without a step. Answers are no measure: a healthy engine may owe a long one for long.
"""

from __future__ import annotations

import statistics
import time

from trainer.errors import RunError
from trainer.rollout.calls import Calls, Seat

EVERY = 1.0  # seconds between two looks
LEAST = 30.0  # seconds of work that are looked at


class Slow:
    """For the thread that `Calls` is for."""

    def __init__(self, factor: float, calls: Calls):
        self.factor, self.calls = factor, calls
        self.looked = self.awaited = time.monotonic()  # the last look; when they were last seen to be awaited

    def look(self) -> list[tuple[str, list[int]]]:
        """Call it often. Returns what is to be said of engines, and names of requests to ask of others, first answer wins.

        An engine that is slow is asked for nothing until it has answered all it owes; one whose calls still do not return is ended.
        """
        now = time.monotonic()
        if now - self.looked < EVERY:
            return []
        if self.calls.engines.awaited:  # they take weights, or answer an evaluation: looked at as soon as they have
            self.awaited = now
            return []
        passed = now - max(self.looked, self.awaited)
        self.looked = now
        found = []
        for name, seat in [*self.calls.seats.items()]:
            seat.silent = seat.silent + min(passed, 2 * EVERY) if seat.calls else 0.0
            typical = self._typical(name)
            if name in self.calls.slow:
                if not seat.asked and seat.silent <= 2 * EVERY:  # one that comes and goes has calls that ask for nothing, to fetch weights
                    self._forgive(name, seat)
                elif seat.silent > 2 * self._limit(typical or 0.0) and (what := self._end(name, seat)):
                    found.append((what, []))
            elif typical is not None and (what := self._slow(name, seat, typical)):
                self.calls.slow[name] = None
                found.append((what, sorted(seat.asked)))
        return found

    def _limit(self, typical: float) -> float:
        """Seconds: however long an engine's calls and steps are, it has time for several."""
        return max(LEAST, self.factor * (self.calls.seconds + typical))

    def _typical(self, name: str) -> float | None:
        """Seconds per step of the other engines; None where none has worked."""
        others = [seat.pace for other, seat in self.calls.seats.items() if other != name and other not in self.calls.slow]
        return statistics.median_low(known) if (known := [pace for pace in others if pace]) else None

    def _slow(self, name: str, seat: Seat, typical: float) -> str | None:
        seconds = seat.worked + seat.silent
        if seconds < self._limit(typical):
            return None
        pace = seconds / max(1, seat.steps)
        seat.last, seat.worked, seat.steps = pace, 0.0, 0
        if pace <= self.factor * typical:
            return None
        return (
            f"{name} is slow: {pace:.3g} s per step, other rollout engines take {typical:.3g} s (rollout.slow={self.factor:g}); "
            f"the {len(seat.asked)} prompts that it has are asked of others too"
        )

    def _forgive(self, name: str, seat: Seat) -> None:
        del self.calls.slow[name]
        seat.last, seat.worked, seat.steps = None, 0.0, 0
        self.calls.offer(name)

    def _end(self, name: str, seat: Seat) -> str | None:
        """Its calls then fail, as those of an engine that died. One that comes and goes nobody waits for: rollout/elastic.py ends it."""
        ref, why = seat.calls[0], f"did not answer for {seat.silent:.0f} s (rollout.slow)"
        seat.silent = 0.0
        if seat.alone:
            self.calls.failed[name] = f"it {why}"
            return None
        what = self.calls.launcher.end_late(ref, why)
        self.calls.error = RunError(what)
        return f"{name} is ended: {what}"
