"""rollout.mode=async while one of four rollout engines is killed (SIGKILL) at random moments: seconds of a step, and what is lost.

Ray, the loop's producer, and what starts an engine again and joins it are the real ones; engines and training are the stand-ins of
`benchmarks.rollouts`, which sleep. An engine that is started again imports torch, and loads no model.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import ray

from benchmarks import rollouts
from benchmarks.report import Ratio, Report
from trainer.cluster import actors, placement
from trainer.cluster.on_ray import OnRay
from trainer.cluster.reservation import reserve
from trainer.cluster.stopping import Stopping
from trainer.cluster.turns import Turns
from trainer.configs.ppo import PpoConfig
from trainer.data.loader import Loader
from trainer.episodes import Prompt
from trainer.online.clock import Clock
from trainer.online.continuous import Continuous
from trainer.online.processes import Sharing, WorkerGroups
from trainer.rollout import engines
from trainer.rollout.engines import RolloutActor, RolloutEngines

ENGINES, KILLS = 4, 3
WARM_UP, STEPS, LAST = 8, 20, 6  # steps that do not count, before and after each kill, and at the end, where little is left to sample
SLOWER = 4 / 3  # limit: three engines of four


class Engine(rollouts.Sleeping):
    """As an engine of a run is built, and joins it."""

    def __init__(self, config: PpoConfig, model_path: str, seed: int) -> None:
        super().__init__(seed)

    def receivers(self) -> int:
        return 1

    def connect(self, *group: Any) -> None:
        """Its weights come by `receive` alone."""


class StandIn(RolloutActor):
    def start(self, *meet: Any) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        engines.ENGINES["hf"] = "benchmarks.kills:Engine"
        return super().start(*meet)


class Rank:
    """As much of a policy's rank as rollout engines join."""

    def address(self) -> tuple[str, int]:
        return actors.here()

    def connect(self, *group: Any) -> None:
        """It has nothing to send."""

    def send(self, version: int | None) -> None:
        """Taking them is what lasts: `Sleeping.receive`."""


def kill(draw: random.Random) -> bool:
    """One engine's process, of those that there are."""
    running = [name for name in ray.util.list_named_actors() if name.startswith("rollout-")]
    if not running:
        return False
    actor = ray.get_actor(draw.choice(running))
    pid = (ray._private.state.actors(actor._actor_id.hex()) or {}).get("Pid")  # type: ignore[attr-defined]
    if pid:
        os.kill(pid, signal.SIGKILL)
    return bool(pid)


def measure(folder: Path) -> tuple[list[float], list[int], Counter[int], int]:
    """Seconds of each step, the steps in which an engine was killed, how often each prompt was learned from, and how many there are."""
    steps = WARM_UP + STEPS * (1 + KILLS) + LAST
    config = PpoConfig.model_validate(
        {
            "model": {"path": "none"},
            "data": {"path": "none:none"},
            "algorithm": {"group_size": rollouts.SAMPLES},
            "rollout": {
                "mode": "async",
                "max_staleness": 4,
                "engines": ENGINES,
                "max_sequences": rollouts.ROOM,
                "engine": "hf",
                "restarts": KILLS,
            },
            "trainer": {"steps": steps, "prompts_per_step": rollouts.GROUPS * ENGINES, "eval_prompts": 0},
            "placement": {"gpus_per_rank": 0},
        }
    )
    engines.RolloutActor = StandIn  # type: ignore[misc]
    wanted = placement.plan(config)
    launcher = OnRay(wanted, reserve(wanted, config.placement))
    started = RolloutEngines(config, "none", launcher)
    policy = SimpleNamespace(ranks=[ray.remote(Rank).options(num_cpus=0).remote()])
    turns = Turns(started, Sharing([]), shared=False)
    workers = WorkerGroups(cast(Any, policy), None, None, started, launcher, config, "", (), folder, turns)
    started.connect(policy.ranks, (), config.trainer.timeout)
    batch = config.trainer.prompts_per_step
    loader = Loader([Prompt(i, [1], {}) for i in range(steps * batch)], batch, 0)
    producer = Continuous(config, workers, loader, rollouts.score)
    seconds, killed, learned, draw = [], [WARM_UP + STEPS * (1 + i) + 1 for i in range(KILLS)], Counter[int](), random.Random(0)
    try:
        producer.sync_and_begin(1, Clock())
        for number in range(1, steps + 1):
            clock = Clock()
            if number in killed:
                threading.Timer(draw.uniform(0, statistics.fmean(seconds[WARM_UP:])), kill, (draw,)).start()
            episodes = producer.next(number, Stopping(), clock)
            learned.update({episode.prompt.index: 1 for episode in episodes})
            time.sleep(rollouts.TRAINING)
            workers.learned = number
            producer.sync_and_begin(number + 1, clock)
            seconds.append(time.perf_counter() - clock.begin)
    finally:
        producer.close()
    if workers.restarts != KILLS:
        raise RuntimeError(f"{KILLS} rollout engines were killed, {workers.restarts} were started again")
    return seconds, killed, learned, steps * batch


def run() -> Report:
    os.environ["RAY_AUTH_MODE"] = "disabled"
    with tempfile.TemporaryDirectory() as folder:
        ray.init(address="local", num_cpus=2 + ENGINES, include_dashboard=False, log_to_driver=False)
        try:
            seconds, killed, learned, prompts = measure(Path(folder))
        finally:
            ray.shutdown()
    before = seconds[WARM_UP : killed[0] - 1]
    after = [seconds[at - 1 : at - 1 + STEPS] for at in killed]
    usual, mean = statistics.fmean(before), statistics.fmean(map(statistics.fmean, after))
    median = statistics.median(s for part in after for s in part) / statistics.median(before)
    ratios = [
        Ratio(f"{STEPS} steps after one of {ENGINES} engines is killed / before, mean", mean / usual, SLOWER),
        Ratio("the same, median", median, SLOWER),
        Ratio("prompts that were not learned exactly once", sum(learned[prompt] != 1 for prompt in range(prompts)), 0),
    ]
    facts = {"step": f"before {usual:.2f} s, the longest after each kill {', '.join(f'{max(part):.2f}' for part in after)} s"}
    return Report("kills", ratios, facts, {"seconds": seconds, "killed": killed})
