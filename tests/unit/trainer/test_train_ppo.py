"""What a step reports, without the processes that it takes."""

from __future__ import annotations

from itertools import combinations

import pytest

from trainer.configs.ppo import PpoConfig
from trainer.configs.reward import OverlongConfig, RewardConfig
from trainer.episodes import Episode, Prompt, Turn
from trainer.online.clock import Clock
from trainer.online.roles import Rollout
from trainer.online.scored import describe, evaluation, pass_at, punish_overlong

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


def test_pass_at_k_is_the_share_over_all_choices_of_k_answers():
    passed, samples = [0, 1, 3, 6], 6
    found = pass_at(passed, samples)
    assert list(found) == ["eval_pass@1", "eval_pass@2", "eval_pass@4", "eval_pass@6"]
    for k in (1, 2, 4, 6):
        choices = [[any(i < c for i in chosen) for chosen in combinations(range(samples), k)] for c in passed]
        assert found[f"eval_pass@{k}"] == pytest.approx(sum(sum(each) / len(each) for each in choices) / len(choices))


def test_an_evaluation_counts_who_passes_and_leaves_dropped_answers_out_of_the_mean():
    values = {"model": {"path": "x"}, "data": {"path": "a:b"}, "trainer": {"eval_samples": 2, "eval_pass": 0.5}}
    config = PpoConfig.model_validate(values | {"reward": {"on_error": "drop"}})
    worth = [(0, 1.0, False), (0, 0.0, True), (1, 0.25, False), (1, 0.5, False), (2, 0.0, False), (2, 0.0, False)]
    episodes = [Episode(Prompt(g, [1], {}), g, [Turn([2], [0.0], "stop")], reward=r, failed=f) for g, r, f in worth]
    assert evaluation(episodes, config) == {"eval_reward": 0.35, "eval_pass@1": pytest.approx(1 / 3), "eval_pass@2": pytest.approx(2 / 3)}
    greedy = PpoConfig.model_validate(values | {"trainer": {}})
    assert evaluation(episodes[::2], greedy) == {"eval_reward": pytest.approx(1.25 / 3)}


def test_long_answers_cost_what_dapo_says_and_it_is_a_term_of_its_own():
    # Of 10 tokens the last 4 are the buffer, so 6 are free: 6 -> 0, 7 -> (6 - 7) / 4 = -0.25, 9 -> -0.75, 10 and more -> -1.
    episodes = [Episode(Prompt(0, [1], {}), 0, [Turn([5] * n, [-0.5] * n, "stop")], reward=1.0) for n in (6, 7, 9, 10, 12)]
    episodes.append(Episode(Prompt(0, [1], {}), 0, [Turn([5] * 12, [-0.5] * 12, "stop")], failed=True))
    config = RewardConfig(overlong=OverlongConfig(buffer=4, max_length=10))
    punish_overlong(episodes, config.overlong, max_new_tokens=20)
    assert [e.reward for e in episodes] == [1.0, 0.75, 0.25, 0.0, 0.0, 0.0]
    assert [e.terms for e in episodes] == [{"overlong": -cost} for cost in (0.0, 0.25, 0.75, 1.0, 1.0)] + [{}]
    assert describe(Rollout.of(episodes), config)["reward/overlong"] == -0.6
    punish_overlong(episodes[:1], OverlongConfig(buffer=4), max_new_tokens=8)
    assert episodes[0].reward == 0.5, "without max_length it is what is sampled at most: 8 - 4 = 4 free, (4 - 6) / 4"


def test_nothing_is_taken_off_by_default():
    punish_overlong([ALONE], RewardConfig().overlong, max_new_tokens=2)
    assert (ALONE.reward, ALONE.terms) == (1.0, {})
