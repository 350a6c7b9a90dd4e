"""What a step reports, without the processes that it takes."""

from __future__ import annotations

import pytest

from trainer.configs.reward import RewardConfig
from trainer.episodes import Episode, Prompt, Turn
from trainer.roles import Rollout
from trainer.scored import describe
from trainer.train_ppo import Clock

ALONE = Episode(Prompt(0, [1, 2, 3], {}), 0, [Turn([5, 6], [-0.5, -0.5], "stop")], reward=1.0)
CONVERSATION = Episode(
    Prompt(1, [1, 2], {}), 1, [Turn([5, 6, 7], [-0.5] * 3, "stop"), Turn([8] * 10), Turn([9], [-0.5], "length")], reward=0.5
)


def test_what_an_environment_wrote_is_no_answer():
    assert describe(Rollout.of([ALONE, CONVERSATION]), RewardConfig()) == {
        "reward": 0.75,
        "reward_std": 0.25,
        "response_tokens": 3.0,
        "truncated": 0.5,
    }


def test_throughput_is_reported_for_all_tokens_and_for_sampled_ones():
    report = Clock().report(Rollout.of([ALONE, CONVERSATION]))
    assert report["tokens_per_second"] * report["seconds"] == pytest.approx((3 + 2 - 1) + (2 + 3 + 10 + 1 - 1))
    assert report["generated_tokens_per_second"] * report["seconds"] == pytest.approx(2 + 4)


def test_laps_add_up_to_no_more_than_the_step():
    clock = Clock()
    clock.lap("reward")
    clock.lap("train")
    report = clock.report(Rollout.of([ALONE]))
    assert list(report)[:3] == ["seconds", "seconds_reward", "seconds_train"]
    assert 0 <= report["seconds_reward"] + report["seconds_train"] <= report["seconds"]
