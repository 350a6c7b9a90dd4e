"""Requests at the rollout engines in rollout.mode=async: each engine works on its own in short calls, with the next one already there.

Between two calls an engine takes weights, or answers an evaluation; its requests stay where they are. An engine that dies, or gives no
sign of life, loses them: they are asked of the others.
Engines that come and go (rollout.elastic) are asked once their weights are new enough, and lose what they have when they leave.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from trainer.cluster import heartbeat
from trainer.errors import RunError
from trainer.rollout import Sampling
from trainer.rollout.engines import Answers, Request, RolloutEngines
from trainer.weights.published import Published

SLICE = 0.05  # seconds that a call works: how long weights may have to wait
AHEAD = 2  # calls that an engine has: one at work, and one that follows at once
CALLS = 1000  # a second, of all engines; with more of them each call is longer
TOGETHER = 0.01  # share of the calls that are waited for together, as each wait looks at all of them


@dataclass
class Seat:
    """One process of a rollout engine, and what it was asked."""

    actor: Any
    place: int  # in the order in which they came
    alone: bool = False  # it comes and goes, and takes weights as they are published
    version: int = -1  # of the weights of such an engine
    coming: int = -1  # of those that it was told of
    asked: set[int] = field(default_factory=set)  # names of requests
    new: list[Request] = field(default_factory=list)  # of which it does not know yet
    calls: list[Any] = field(default_factory=list)
    tokens: int = 0  # of its answers
    worked: float = 0.0  # seconds, and steps that it took in them; since trainer/rollout/slow.py has looked at them
    steps: int = 0
    silent: float = 0.0  # seconds since a call returned
    last: float | None = None  # seconds per step when they were looked at

    @property
    def pace(self) -> float | None:
        """Seconds per step; None before the first."""
        return self.last or (self.worked / self.steps if self.steps else None)


class Calls:
    """All of a run. For one thread."""

    def __init__(self, engines: RolloutEngines, sampling: Sampling):
        self.engines, self.sampling, self.launcher = engines, sampling, engines.launcher
        self.actors: Mapping[int, Any] = {}  # of the sync group, those that have weights, by number
        self.guests: Mapping[str, Any] = {}  # by name, those that come and go and are ready
        self.news: Published | None = None  # weights for these
        self.seats: dict[str, Seat] = {}  # by the engine's name; none where its process died
        self.dead: dict[str, Any] = {}  # processes that died, until another one has their name
        self.error: RunError | None = None  # what the last of them died of
        self.failed: dict[str, str] = {}  # guests that did, and why
        self.busy = 0.0  # seconds of work, of all engines
        self.most = math.inf  # requests of an engine
        self.seconds = max(SLICE, AHEAD * len(engines.actors) / CALLS)
        self.watch, self.looked = heartbeat.Watch(), time.monotonic()
        self.slow: dict[str, None] = {}  # names of seats that are asked for nothing
        self.open = 0  # requests that are not answered
        self.places = count()
        self.least: list[tuple[int, int, str]] = []  # a heap: what a seat was asked, its place and name; true of it, or left from before
        self.behind: dict[str, None] = {}  # names of seats that are not in it, as their weights were too old for `free`
        self.found: tuple[Any, Any] = (None, None)  # processes that `find` saw last
        self.due: dict[str, None] = {}  # names of seats that may be called
        self.names: dict[Any, str] = {}  # of seats, by their calls
        self.told: Published | None = None  # weights that all guests were due for

    def find(self) -> list[int]:
        """Look which processes there are. Returns the names of requests that went with one that is gone or was replaced."""
        lost: list[int] = []
        guests = self.guests
        if self.found[0] is self.actors and self.found[1] is guests:
            return lost
        self.found = self.actors, guests
        found = {f"rollout-{number}": actor for number, actor in self.actors.items()} | dict(guests)
        for name in self.seats.keys() - found.keys():
            lost += self._remove(name).asked
        for name, actor in found.items():
            seat = self.seats.get(name)
            if self.dead.get(name) is actor or (seat and seat.actor is actor):
                continue
            self.dead.pop(name, None)
            lost += self._remove(name).asked if seat else ()
            self.seats[name] = Seat(actor, seat.place if seat else next(self.places), alone=name in guests)
            self.offer(name)
        return lost

    def offer(self, name: str) -> None:
        """Have `free` look at this engine anew: it was asked, or has less to do, or newer weights."""
        self.due[name] = None
        heapq.heappush(self.least, (len(self.seats[name].asked), self.seats[name].place, name))
        if len(self.least) > 8 * len(self.seats) + 64:  # most are left from before
            self.least = [(len(seat.asked), seat.place, name) for name, seat in self.seats.items()]
            heapq.heapify(self.least)

    def free(self, version: int) -> str | None:
        """The engine that has least to do, of those that have the weights of `version`, or newer ones; the first of several. None where
        each of them has as much as it may."""
        while self.least:
            asked, place, name = self.least[0]
            seat = self.seats.get(name) if name not in self.slow else None
            if seat and (len(seat.asked), seat.place) == (asked, place):
                if not seat.alone or seat.version >= version:
                    return name if asked < self.most else None
                self.behind[name] = None
            heapq.heappop(self.least)
        return None

    def ask(self, name: int, prompt_ids: list[int], version: int = 0, sampling: Sampling | None = None) -> None:
        """Of the engine that is `free`. `sampling`: of this request, where it is not as all are."""
        free = self.free(version)
        assert free is not None
        seat = self.seats[free]
        seat.asked.add(name)
        seat.new.append((name, prompt_ids, sampling))
        self.open += 1
        self.offer(free)

    def forget(self) -> None:
        """All processes: a handle of one that has ended keeps its name taken."""
        self.actors, self.guests, self.found = {}, {}, (None, None)
        for kept in (self.seats, self.dead, self.names, self.due, self.slow, self.behind):
            kept.clear()
        self.open = 0

    def collect(self, seconds: float) -> tuple[dict[int, Answers], list[int]]:
        """Have the engines work, for at most `seconds`. Returns answers that are complete, and names of requests whose engine died.

        Raises what an engine of the sync group raised.
        """
        for name in self.behind.keys() & self.seats.keys():  # another request may have older weights
            self.offer(name)
        self.behind.clear()
        if self.news is not self.told:
            self.told = self.news
            self.due |= dict.fromkeys(self.guests)
        for name in self.due:
            seat = self.seats.get(name)
            while seat and len(seat.calls) < AHEAD and (seat.asked or (seat.alone and self._behind(seat))):
                seat.calls.append(self._call(seat))
                seat.new = []
                self.names[seat.calls[-1]] = name
        self.due.clear()
        if not self.names:
            time.sleep(seconds)
            return {}, []
        self._end_silent()
        refs = list(self.names)
        some, _ = self.launcher.done(refs, seconds, 1 + int(len(refs) * TOGETHER))
        done, _ = self.launcher.done(refs) if some else ([], None)
        answers: dict[int, Answers] = {}
        lost: list[int] = []
        for ref in done:
            name = self.names.pop(ref, "")
            if name not in self.seats:
                continue
            seat = self.seats[name]
            seat.calls.remove(ref)
            try:
                complete, busy, steps, *version = self.launcher.get(ref)
            except Exception as error:
                if not seat.alone and not self.launcher.is_death(error):
                    raise
                lost += seat.asked
                self.dead[name] = self._remove(name).actor
                self._died(name, seat, str(error).strip().splitlines()[-1 if seat.alone else 0])
                continue
            seat.version = version[0] if version else seat.version
            self.busy += busy
            seat.worked, seat.steps, seat.silent = seat.worked + busy, seat.steps + steps, 0.0
            self.open -= len(seat.asked & complete.keys())
            seat.asked -= complete.keys()
            self.offer(name)
            seat.tokens += sum(len(turn.token_ids) for turns, _ in complete.values() for turn in turns)
            answers |= complete
        return answers, lost

    def _remove(self, name: str) -> Seat:
        seat = self.seats.pop(name)
        self.slow.pop(name, None)
        self.open -= len(seat.asked)
        for ref in seat.calls:
            self.names.pop(ref, None)
        return seat

    def _behind(self, seat: Seat) -> bool:
        return self.news is not None and seat.version < self.news.version

    def _call(self, seat: Seat) -> Any:
        if not seat.alone:
            return seat.actor.work.remote(seat.new, self.sampling, self.seconds)
        news = self.news if self._behind(seat) and seat.coming == seat.version else None
        if news:
            seat.coming = news.version
        return seat.actor.work_alone.remote(seat.new, self.sampling, self.seconds, news)

    def _died(self, name: str, seat: Seat, why: str) -> None:
        if seat.alone:
            self.failed[name] = why
        else:
            self.error = self.error or RunError(f"{name} died: {why}")

    def _end_silent(self) -> None:
        if self.engines.awaited or time.monotonic() - self.looked < heartbeat.EVERY:
            return
        self.looked = time.monotonic()
        refs = [ref for ref, name in self.names.items() if not self.seats[name].alone]
        if refs and (ended := self.launcher.end_silent(refs, self.watch)):
            self.error = RunError("; ".join(ended))
