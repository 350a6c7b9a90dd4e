"""A Ray job that hangs on purpose: `python hanging.py sleep|collective|reward`; it prints HUNG when the hang is about to begin."""

from __future__ import annotations

import datetime
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def sleep() -> None:
    import ray

    class Sleeper:
        def nap(self) -> None:
            time.sleep(3600)

    ray.init()
    actor: Any = ray.remote(num_cpus=0)(Sleeper)
    sleepers = [actor.options(name=f"sleeper-{i}").remote() for i in range(2)]
    print("HUNG", flush=True)
    ray.get([sleeper.nap.remote() for sleeper in sleepers])


def collective() -> None:
    """Ranks 0 and 1 reduce; rank 2 never comes."""
    import ray

    class Rank:
        def __init__(self, rank: int, file: str):
            import torch.distributed as dist

            self.rank = rank
            dist.init_process_group("gloo", f"file://{file}", rank=rank, world_size=3, timeout=datetime.timedelta(hours=1))

        def step(self) -> None:
            import torch
            import torch.distributed as dist

            if self.rank == 2:
                time.sleep(3600)
            dist.all_reduce(torch.ones(2))

        def ready(self) -> int:
            return self.rank

    ray.init()
    file = tempfile.mktemp(prefix="flotilla-test-")
    actor: Any = ray.remote(num_cpus=0)(Rank)
    ranks = [actor.options(name=f"policy-{i}").remote(i, file) for i in range(3)]
    ray.get([rank.ready.remote() for rank in ranks])
    print("HUNG", flush=True)
    ray.get([rank.step.remote() for rank in ranks])


def stuck_reward(text: str, row: dict[str, str]) -> float:
    time.sleep(3600)
    return 0.0


def reward() -> None:
    from trainer.configs.reward import RewardConfig
    from trainer.episodes import Episode, Prompt, Turn
    from trainer.rewards.scorer import Scorer

    with Scorer(RewardConfig.model_validate({"function": "support.hanging:stuck_reward", "timeout": 3600, "workers": 1})) as scorer:
        print("HUNG", flush=True)
        scorer.score([Episode(Prompt(0, [1], {}), 0, [Turn([0], [0.0], "stop")], text="42")])


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), sys.argv[2]]  # this file, and the project
    {"sleep": sleep, "collective": collective, "reward": reward}[sys.argv[1]]()
