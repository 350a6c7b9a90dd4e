"""What the rollout engines of a run are asked for, without their processes."""

from types import SimpleNamespace
from typing import Any

import pytest
from support.configs import settings

from trainer.episodes import Prompt
from trainer.rollout.engines import RolloutEngines


@pytest.mark.parametrize(("away", "shares"), [([], {0: [0, 1], 1: [2, 3], 2: [4]}), ([1], {0: [0, 1, 2], 2: [3, 4]})])
def test_each_engine_that_serves_gets_a_share_of_the_prompts_and_a_seed_of_its_own(tmp_path, away, shares):
    engines = object.__new__(RolloutEngines)
    engines.config = settings(tmp_path, rollout={"engines": 3, "temperature": 0.7})
    asked: dict[int, tuple[Any, ...]] = {}

    def actor(number: int) -> Any:
        return SimpleNamespace(sample=SimpleNamespace(remote=lambda *given: asked.update({number: given})))

    engines.actors, engines.away = [actor(i) for i in range(3)], dict.fromkeys(away, 0.0)
    prompts = [Prompt(i, [1], {}) for i in range(5)]
    engines.start(prompts, 4, seed=100)
    assert {i: [prompt.index for prompt in given[0]] for i, given in asked.items()} == shares
    assert {i: given[1] for i, given in asked.items()} == shares, "groups are numbered over all engines"
    assert {i: given[3] for i, given in asked.items()} == {i: 100 + i for i in shares}
    assert {(given[2].samples, given[2].temperature) for given in asked.values()} == {(4, 0.7)}
    engines.start(prompts, 1, seed=100, greedy=True)
    assert {given[2].temperature for given in asked.values()} == {0.0}
