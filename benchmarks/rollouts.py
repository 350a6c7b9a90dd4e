"""Whether rollout engines and training wait for each other in rollout.mode=async: a step against the longer of the two by itself.

The loop's producer and its Ray actors are the real ones. Engines and training are stand-ins that sleep: an engine has room for so many
answers, whose seconds are long-tailed; training and the engines' taking of weights take the same time each time.
"""

from __future__ import annotations

import heapq
import os
import random
import statistics
import time
from types import SimpleNamespace
from typing import Any, cast

import ray

from benchmarks.report import Ratio, Report
from trainer.cluster.on_ray import OnRay
from trainer.cluster.stopping import Stopping
from trainer.configs.ppo import PpoConfig
from trainer.data.loader import Loader
from trainer.episodes import Episode, Prompt, Turn
from trainer.online.clock import Clock
from trainer.online.continuous import Continuous
from trainer.rollout import Sampling
from trainer.rollout.engines import RolloutActor
from trainer.rollout.stepped import SteppedEngine

ENGINES = (1, 4, 16)
STEPS, WARM_UP = 24, 8
GROUPS, SAMPLES, ROOM = 8, 4, 16  # per engine: prompts of a step, answers to each, answers at a time
MEAN, SIGMA, LONGEST = 0.5, 1.0, 3.0  # of an answer's seconds, log-normal
TRAINING, TAKING = 0.9, 0.05  # seconds
LONGER, IDLE, PAUSE = 1.10, 0.05, 0.2  # limits: of a step, of the engines' idle time, seconds of a pause beside TAKING


class Sleeping(SteppedEngine):
    """Answers take their time, as many as there is room for at once."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.draw = random.Random(seed)
        self.waiting: list[int] = []
        self.ends: list[tuple[float, int]] = []  # when, and which request
        self.left: dict[int, int] = {}  # answers that a request still owes

    def add(self, number: int, prompt_ids: list[int], sampling: Sampling) -> None:
        self.waiting += [number] * sampling.samples
        self.left[number] = sampling.samples

    def step(self) -> dict[int, list[Turn]]:
        now, done = time.perf_counter(), {}
        while self.ends and self.ends[0][0] <= now:
            at, number = heapq.heappop(self.ends)
            self._begin(at)
            self.left[number] -= 1
            if not self.left[number]:
                del self.left[number]
                done[number] = [Turn([1], [-1.0], "stop", self.version) for _ in range(SAMPLES)]
        while self.waiting and len(self.ends) < ROOM:
            self._begin(now)
        time.sleep(0.002)
        return done

    def _begin(self, at: float) -> None:
        if self.waiting:
            heapq.heappush(self.ends, (at + seconds(self.draw), self.waiting.pop(0)))

    def seed(self, value: int) -> None:
        """Its draws are its own."""

    def decode(self, answers: list[list[int]]) -> list[str]:
        return ["" for _ in answers]

    def receive(self, version: int) -> None:
        time.sleep(TAKING)
        self.version = version
        self.ends = [(at + TAKING, number) for at, number in self.ends]  # nothing is sampled meanwhile


class StandIn(RolloutActor):
    def __init__(self, seed: int) -> None:
        self.engine = cast(Any, Sleeping(seed))


class Workers:
    """As much of `WorkerGroups` as a producer needs."""

    def __init__(self, count: int) -> None:
        self.learned = 0
        self.launcher = OnRay(cast(Any, None), cast(Any, None))  # nothing is placed
        actors = [ray.remote(StandIn).options(num_cpus=0).remote(seed) for seed in range(count)]
        self.engines = SimpleNamespace(
            actors=actors,
            serving=lambda: dict(enumerate(actors)),
            awaited=False,
            launcher=self.launcher,
            sampling=lambda samples: Sampling(1, samples=samples),
        )
        self.pauses: list[float] = []

    def sync(self) -> None:
        began = time.perf_counter()
        ray.get([actor.call.remote("receive", self.learned) for actor in self.engines.actors])
        self.pauses.append(time.perf_counter() - began)


def seconds(draw: random.Random) -> float:
    """Of an answer."""
    return min(LONGEST, draw.lognormvariate(0, SIGMA) * MEAN / 1.5)


def score(episodes: list[Episode], step: int, stopping: Stopping) -> None:
    for episode in episodes:
        episode.reward = 1.0


def measure(count: int, steps: int = STEPS, training: float = TRAINING, **rollout: Any) -> dict[str, list[float]]:
    """With so many engines, of each step: its seconds and metrics. And the seconds of pauses."""
    config = PpoConfig.model_validate(
        {
            "model": {"path": "none"},
            "data": {"path": "none:none"},
            "algorithm": {"group_size": SAMPLES},
            "rollout": {"mode": "async", "max_staleness": 4, "engines": count, "max_sequences": ROOM, "engine": "hf"} | rollout,
            "trainer": {"steps": steps + 10, "prompts_per_step": GROUPS * count, "eval_prompts": 0},
        }
    )
    workers = Workers(count)
    loader = Loader([Prompt(i, [1], {}) for i in range(1000)], GROUPS * count, 0)
    producer = Continuous(config, cast(Any, workers), loader, score)
    found: dict[str, list[float]] = {"step": []}
    try:
        producer.sync_and_begin(1, Clock())
        for step in range(1, steps + 1):
            clock = Clock()
            producer.next(step, Stopping(), clock)
            time.sleep(training)
            workers.learned = step
            producer.sync_and_begin(step + 1, clock)
            found["step"].append(time.perf_counter() - clock.begin)
            for name, value in producer.metrics().items():
                found.setdefault(name, []).append(value)
    finally:
        producer.close()
        for actor in workers.engines.actors:
            ray.kill(actor)
    return found | {"pause": workers.pauses}


def run() -> Report:
    os.environ["RAY_AUTH_MODE"] = "disabled"
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        found = {count: {name: values[WARM_UP:] for name, values in measure(count).items()} for count in ENGINES}
    finally:
        ray.shutdown()
    draw = random.Random(0)
    mean = statistics.fmean(seconds(draw) for _ in range(100_000))
    alone = GROUPS * SAMPLES * mean / ROOM + TAKING  # taking weights stops an engine
    ratios = []
    for count, values in found.items():
        step = statistics.fmean(values["step"])
        idle = statistics.fmean(values["engines_idle"]) - TAKING / step
        longer = step / max(alone, TRAINING + TAKING)
        ratios.append(Ratio(f"step / the longer of sampling and training, {count} engines", longer, LONGER))
        ratios.append(Ratio(f"share of idle time of {count} engines, less taking weights", idle, IDLE))
        ratios.append(Ratio(f"longest pause of {count} engines, less taking weights, seconds", max(values["pause"]) - TAKING, PAUSE))
    facts = {"seconds alone": f"sampling {alone:.2f}  training {TRAINING + TAKING:.2f}"}
    return Report("rollouts", ratios, facts, {str(count): values for count, values in found.items()})
