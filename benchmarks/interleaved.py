"""Contenders in processes of their own, measured in turns: what disturbs the machine disturbs them alike.

A contender is a function `contend(turns, **settings)` that starts up and then, for ever, does one step between `turns.begin()` and
`turns.end(...)`. While it is another's turn it waits in `begin`, idle.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.report import RESULTS

START_SECONDS = 300  # vLLM's first start compiles
STEP_SECONDS = 120


@dataclass(frozen=True)
class Step:
    seconds: float
    tokens: int  # of the responses
    reward: float  # mean of the step's episodes
    warm: bool = False  # the first of a turn: caches and pipelines fill, so it does not count
    cpu: tuple[float, float] | None = None  # seconds used by its end, where asked for: by ranks and rollout engines, by all other processes


class Turns:
    """The contender's end."""

    def __init__(self, pipe: Connection):
        self.pipe = pipe
        self.left = 0
        self.steps: list[Step] = []

    def begin(self, settle: Callable[[], object] = lambda: None) -> None:
        """Wait for the next turn, if this one has ended, after `settle()` has ended work that goes on in the background."""
        if self.left == 0:
            settle()
            self.pipe.send(self.steps)
            self.left, self.steps = self.pipe.recv(), []
            if self.left == 0:
                raise SystemExit(0)
        self.began = time.perf_counter()

    def end(self, tokens: int, reward: float) -> None:
        self.steps.append(Step(time.perf_counter() - self.began, tokens, reward, warm=not self.steps))
        self.left -= 1


@dataclass
class Side:
    """The benchmark's end of a contender."""

    name: str
    function: str  # package.module:function
    settings: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)

    def launch(self) -> None:
        """Begin starting."""
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        arguments = (self.function, self.settings, self.environment, theirs, self.log)
        self.process = context.Process(target=_contend, args=arguments, name=self.name)
        self.process.start()
        theirs.close()

    def ready(self) -> None:
        """Wait for its start; raises RuntimeError where the process ends before."""
        self._answer(START_SECONDS)

    @property
    def log(self) -> str:
        return str(RESULTS / f"{self.name.replace(' ', '-')}.log")

    def turn(self, steps: int) -> None:
        self.pipe.send(steps)
        self.steps += self._answer(STEP_SECONDS * steps)

    def stop(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has ended already, and said why in its log
            self.pipe.send(0)
        self.process.join(30)
        self.process.kill()

    def _answer(self, seconds: float) -> list[Step]:
        try:
            if self.pipe.poll(seconds):
                return self.pipe.recv()
        except EOFError:
            raise RuntimeError(f"{self.name} ended early; see {self.log}") from None
        raise RuntimeError(f"{self.name} did not answer within {seconds:g} s; see {self.log}")

    @property
    def counted(self) -> list[Step]:
        return [step for step in self.steps if not step.warm]

    @property
    def median(self) -> float:
        """Seconds of a step."""
        return statistics.median(step.seconds for step in self.counted)

    @property
    def per_token(self) -> float:
        """Seconds per response token over all counted steps: sides that sample their own lengths compare by it."""
        return sum(step.seconds for step in self.counted) / sum(step.tokens for step in self.counted)

    @property
    def tokens(self) -> float:
        return statistics.mean(step.tokens for step in self.counted)


def race(sides: list[Side], rounds: int, steps: int) -> None:
    """Start all sides, give them `rounds` turns of `steps` steps each, alternating, and stop them."""
    RESULTS.mkdir(exist_ok=True)
    started: list[Side] = []
    try:
        for side in sides:
            started.append(side)
            side.launch()
            side.ready()
        for i in range(rounds):
            for side in sides if i % 2 == 0 else reversed(sides):
                side.turn(steps)
    finally:
        for side in started:
            side.stop()


def _contend(function: str, settings: dict[str, Any], environment: dict[str, str], pipe: Connection, log: str) -> None:
    os.environ.update(environment)
    with open(log, "w") as out:  # noqa: PTH123
        os.dup2(out.fileno(), sys.stdout.fileno())
        os.dup2(out.fileno(), sys.stderr.fileno())
    module, name = function.split(":")
    getattr(importlib.import_module(module), name)(Turns(pipe), **settings)
