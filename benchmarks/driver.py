"""What the driver does for one episode in rollout.mode=async, with 10, 100 and 1000 rollout engines: its time must not grow with them.

The loop's producer and its requests are the real ones, in one thread. Ray, the engines, rewards and training are stand-ins in a time that
is counted, not waited for; what they take themselves is left out, and so is what Ray's own calls would take.
"""

from __future__ import annotations

import heapq
import random
import statistics
import threading
import time
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

from benchmarks.report import Ratio, Report
from benchmarks.rollouts import seconds
from trainer.cluster.stopping import Stopping
from trainer.configs.ppo import PpoConfig
from trainer.data.loader import Loader
from trainer.episodes import Episode, Prompt, Turn
from trainer.online.clock import Clock
from trainer.online.continuous import Continuous
from trainer.rollout import Sampling, calls
from trainer.rollout.engines import Request

ENGINES = (10, 100, 1000)
STEPS, WARM_UP = {10: 90, 100: 18, 1000: 6}, {10: 30, 100: 6, 1000: 3}
GROUPS, SAMPLES, ROOM, TOKENS = 8, 4, 16, 200  # per engine: prompts of a step, answers to each, prompts at a time, tokens of an answer
LONGER = 2  # times the seconds of benchmarks/rollouts.py: answers of a second
TRAINING = 1.0  # seconds
GROWTH, MOST = 1.2, 100.0  # limits: 1000 engines beside 10, and microseconds


class Others:
    """Ray and engines. `spent` is what they took of the CPU time."""

    def __init__(self, engines: int) -> None:
        self.now, self.spent = 0.0, 0.0
        self.order = count()
        self.calls: list[tuple[float, int, Any]] = []  # heap: when a call ends, and its answers
        self.complete: dict[Any, tuple[dict[int, Any], float, int]] = {}
        draws = [random.Random(seed) for seed in range(engines)]
        self.actors = [SimpleNamespace(work=SimpleNamespace(remote=self._outside(Working(self, draw)))) for draw in draws]
        self.wait, self.get = self._outside(self._wait), self._outside(self._get)

    def _outside(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def outside(*args: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                return act(*args, **named)
            finally:
                self.spent += time.thread_time() - began

        return outside

    def _wait(self, refs: list[Any], num_returns: int, timeout: float, fetch_local: bool) -> tuple[list[Any], list[Any]]:
        until = self.now + timeout
        while self.calls and self.calls[0][0] <= until and (timeout == 0 or len(self.complete) < num_returns):
            at, _, (ref, value) = heapq.heappop(self.calls)
            self.now, self.complete[ref] = max(self.now, at), value
        self.now = self.now if len(self.complete) >= num_returns else until
        return list(self.complete), []

    def _get(self, ref: Any) -> tuple[dict[int, Any], float, int]:
        return self.complete.pop(ref)


class Working:
    """`RolloutActor.work` of one engine, call after call."""

    def __init__(self, others: Others, draw: random.Random) -> None:
        self.others, self.draw = others, draw
        self.free = draw.uniform(0, 2)  # when it has done its calls: they do not all end at once
        self.asked: list[tuple[float, int]] = []  # heap: when an answer ends, and its name

    def __call__(self, requests: list[Request], sampling: Sampling, length: float) -> object:
        began = max(self.free, self.others.now)
        self.free = began + length
        for name, *_ in requests:
            heapq.heappush(self.asked, (began + LONGER * max(seconds(self.draw) for _ in range(sampling.samples)), name))
        answers = {}
        while self.asked and self.asked[0][0] <= self.free:
            turns = [Turn([1] * TOKENS, [-1.0] * TOKENS, "stop") for _ in range(SAMPLES)]
            answers[heapq.heappop(self.asked)[1]] = (turns, [""] * SAMPLES)
        ref = object()
        heapq.heappush(self.others.calls, (self.free, next(self.others.order), (ref, (answers, length, 1))))
        return ref


class InTurns(threading.Condition):
    """In place of threads: where the loop waits, the others get their turn."""

    turn: Callable[[], None]

    def wait(self, timeout: float | None = None) -> bool:
        self.turn()
        return True

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        return predicate()


def score(episodes: list[Episode], step: int, stopping: Stopping) -> None:
    for episode in episodes:
        episode.reward = 1.0


def measure(engines: int) -> list[float]:
    """Microseconds of the driver for each episode, of each step."""
    others = Others(engines)
    config = PpoConfig.model_validate(
        {
            "model": {"path": "none"},
            "data": {"path": "none:none"},
            "algorithm": {"group_size": SAMPLES},
            "rollout": {"mode": "async", "max_staleness": 4, "engines": engines, "max_sequences": ROOM, "engine": "hf"},
            "trainer": {"steps": STEPS[engines] + 10, "prompts_per_step": GROUPS * engines, "eval_prompts": 0},
        }
    )
    sampling = Sampling(1, samples=SAMPLES)
    workers = SimpleNamespace(
        engines=SimpleNamespace(
            actors=others.actors, serving=lambda: dict(enumerate(others.actors)), awaited=True, sampling=lambda samples: sampling
        ),
        sync=lambda: None,
        published=None,
    )
    producer = Continuous(config, cast(Any, workers), Loader([Prompt(i, [1], {}) for i in range(10_000)], GROUPS * engines, 0), score)
    producer.changed = InTurns()
    producer.threads = [threading.current_thread()]  # they run

    def turn() -> None:
        producer._sample()
        producer._score()

    producer.changed.turn = turn
    found = []
    with mock.patch.object(calls, "ray", others), mock.patch.object(calls.time, "sleep", lambda seconds: None):
        for step in range(1, STEPS[engines] + 1):
            clock, others.spent = Clock(), 0.0
            began = time.thread_time()
            producer.sync_and_begin(step, clock)
            episodes = producer.next(step, Stopping(), clock)
            trained = others.now + TRAINING
            while others.now < trained:
                turn()
                others.now += 0.001  # a turn takes time too
            found.append((time.thread_time() - began - others.spent) / len(episodes) * 1e6)
    return found[WARM_UP[engines] :]


def run() -> Report:
    found = {engines: measure(engines) for engines in ENGINES}
    each = {engines: statistics.median(values) for engines, values in found.items()}
    least, most = each[ENGINES[0]], each[ENGINES[-1]]
    ratios = [
        Ratio(f"driver's time per episode, {ENGINES[-1]} engines / {ENGINES[0]} engines", most / least, GROWTH),
        Ratio(f"driver's microseconds per episode, {ENGINES[-1]} engines", most, MOST),
    ]
    facts = {"microseconds": "  ".join(f"{engines} engines {value:.1f}" for engines, value in each.items())}
    return Report("driver", ratios, facts, {str(engines): values for engines, values in found.items()})
