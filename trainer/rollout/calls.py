"""Requests at the rollout engines in rollout.mode=async: each engine works on its own in short calls, with the next one already there.

Between two calls an engine takes weights, or answers an evaluation; its requests stay where they are. An engine that dies, or gives no
sign of life, loses them: they are asked of the others.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError

from trainer import actors, heartbeat
from trainer.actors import RunError
from trainer.rollout import Sampling
from trainer.rollout.engines import Answers, RolloutEngines

SLICE = 0.05  # seconds that a call works: how long weights may have to wait
AHEAD = 2  # calls that an engine has: one at work, and one that follows at once
CALLS = 1000  # a second, of all engines; with more of them each call is longer


@dataclass
class Seat:
    """One process of a rollout engine, and what it was asked."""

    actor: Any
    asked: set[int] = field(default_factory=set)  # names of requests
    new: list[tuple[int, list[int]]] = field(default_factory=list)  # of which it does not know yet
    calls: list[Any] = field(default_factory=list)


class Calls:
    """All of a run. For one thread."""

    def __init__(self, engines: RolloutEngines, sampling: Sampling):
        self.engines, self.sampling = engines, sampling
        self.actors: list[Any] = []  # those that have weights
        self.seats: dict[int, Seat] = {}  # by the engine's number; none where its process died
        self.dead: dict[int, Any] = {}  # processes that died, until another one has their number
        self.error: RunError | None = None  # what the last of them died of
        self.busy = 0.0  # seconds of work, of all engines
        self.seconds = max(SLICE, AHEAD * len(engines.actors) / CALLS)
        self.watch, self.looked = heartbeat.Watch(), time.monotonic()

    @property
    def open(self) -> int:
        """Requests that are not answered."""
        return sum(len(seat.asked) for seat in self.seats.values())

    def find(self) -> list[int]:
        """Look which processes there are. Returns the names of requests that went with one that was replaced."""
        lost: list[int] = []
        for number, actor in enumerate(self.actors):
            seat = self.seats.get(number)
            if self.dead.get(number) is actor or (seat and seat.actor is actor):
                continue
            self.dead.pop(number, None)
            lost += seat.asked if seat else ()
            self.seats[number] = Seat(actor)
        return lost

    def ask(self, name: int, prompt_ids: list[int]) -> None:
        """Of the engine that has least to do; `find` has found one."""
        seat = min(self.seats.values(), key=lambda seat: len(seat.asked))
        seat.asked.add(name)
        seat.new.append((name, prompt_ids))

    def forget(self) -> None:
        """All processes: a handle of one that has ended keeps its name taken."""
        self.actors = []
        self.seats.clear()
        self.dead.clear()

    def collect(self, seconds: float) -> tuple[dict[int, Answers], list[int]]:
        """Have the engines work, for at most `seconds`. Returns answers that are complete, and names of requests whose engine died.

        Raises what an engine raised.
        """
        for seat in self.seats.values():
            while seat.asked and len(seat.calls) < AHEAD:
                seat.calls.append(seat.actor.work.remote(seat.new, self.sampling, self.seconds))
                seat.new = []
        numbers = {ref: number for number, seat in self.seats.items() for ref in seat.calls}
        if not numbers:
            time.sleep(seconds)
            return {}, []
        self._end_silent(list(numbers))
        refs = list(numbers)
        some, _ = ray.wait(refs, num_returns=1, timeout=seconds, fetch_local=False)
        done, _ = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False) if some else ([], None)
        answers: dict[int, Answers] = {}
        lost: list[int] = []
        for ref in done:
            number = numbers[ref]
            if number not in self.seats:
                continue
            seat = self.seats[number]
            seat.calls.remove(ref)
            try:
                complete, busy = ray.get(ref)
            except RayActorError as error:
                lost += seat.asked
                self.dead[number] = self.seats.pop(number).actor
                self.error = self.error or RunError(f"rollout-{number} died: {str(error).strip().splitlines()[0]}")
                continue
            self.busy += busy
            seat.asked -= complete.keys()
            answers |= complete
        return answers, lost

    def _end_silent(self, refs: list[Any]) -> None:
        if self.engines.awaited or time.monotonic() - self.looked < heartbeat.EVERY:
            return
        self.looked = time.monotonic()
        if ended := actors.end_silent(refs, self.watch):
            self.error = RunError("; ".join(ended))
