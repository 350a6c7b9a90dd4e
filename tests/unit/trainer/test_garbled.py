"""A run ends where rollout engines sampled from other weights than the policy has."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.configs import settings

from trainer.episodes import Episode, Prompt, Turn
from trainer.errors import RunError
from trainer.objectives.kl import KlController
from trainer.online.clock import Clock
from trainer.online.roles import Rollout
from trainer.train_ppo import learn


def after(difference: float, *, newest: bool, dtype: str = "float32", **rollout: Any) -> None:
    stats = {"logprob_diff": difference, "kl": 0.0, "kl_old": 0.0}
    policy = SimpleNamespace(train=lambda *_, **__: dict(stats), said=lambda rollout: rollout.flat.mask_N)
    workers: Any = SimpleNamespace(to_ranks=lambda: None, turns=SimpleNamespace(shared=False), reference=None, critic=None, policy=policy)
    algorithm = {"importance_cap": None} if "top_p" in rollout else {}
    config = settings(Path("model"), model={"dtype": dtype}, rollout=rollout, algorithm=algorithm)
    episodes = [Episode(Prompt(0, [3], {}), 0, [Turn([4, 5], [-1.0, -1.0], "stop")], reward=reward) for reward in (0.0, 1.0)]
    learn(config, workers, Rollout.of(episodes), KlController(0.0, None, 1), 3, Clock(), newest=newest)


@pytest.mark.parametrize("mode", ["sync", "one_step", "async"])
@pytest.mark.parametrize(("dtype", "limit"), [("float32", 0.1), ("bfloat16", 0.5)])
def test_weights_that_were_synced_and_not_learned_since_are_compared_in_every_mode(mode, dtype, limit):
    after(limit - 0.01, newest=True, dtype=dtype, mode=mode)
    with pytest.raises(RunError, match=rf"^step 3: rollout engines and policy differ by {limit + 0.01:g} in mean log-prob.* is {limit:g};"):
        after(limit + 0.01, newest=True, dtype=dtype, mode=mode)


@pytest.mark.parametrize("mode", ["one_step", "async"])
def test_older_weights_differ_by_what_was_learned_since(mode):
    after(2.0, newest=False, mode=mode)


def test_a_limit_of_its_own_and_a_nucleus():
    after(2.0, newest=True, top_p=0.9)
    with pytest.raises(RunError, match=r"rollout\.max_logprob_diff is 0\.05"):
        after(0.06, newest=True, mode="sync", max_logprob_diff=0.05)
