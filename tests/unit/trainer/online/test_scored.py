"""What is learned from answers that were cut off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.configs import settings

from trainer.configs.reward import RewardConfig
from trainer.episodes import Episode, Prompt, Turn
from trainer.objectives.aggregation import denominators
from trainer.online.roles import Rollout
from trainer.online.scored import advantages, describe, truncated


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_an_answer_that_was_cut_off_counts_for_the_others_and_is_not_learned_from(tmp_path: Path, name: str):
    config = settings(tmp_path, algorithm={"name": name, "mask_truncated": True})
    told = [(1.0, [5, 6], "stop"), (0.0, [5], "stop"), (0.5, [7, 8, 9], "length")]
    prompt = Prompt(0, [1], {})
    episodes = [Episode(prompt, 0, [Turn(ids, [-1.0] * len(ids), finish)], reward=reward) for reward, ids, finish in told]  # type: ignore[arg-type]
    found, everything = Rollout.of(episodes, (), truncated(config, episodes)), Rollout.of(episodes)
    assert found.kept == [0, 1, 2] and found.flat.mask_N.tolist() == [1, 1, 1, 0, 0, 0]
    (own_N, _), (all_N, _) = (advantages(config.algorithm, each, None, None, 0.0) for each in (found, everything))
    assert torch.equal(own_N[:3], all_N[:3]) and own_N[:3].abs().sum() > 0
    counts = denominators(found.flat.mask_N, found.flat.episode_N, 3)
    assert (counts.tokens, counts.sequences) == (3, 2)
    said, before = (describe(each, RewardConfig()) for each in (found, everything))
    assert said == before and said["response_tokens"] == 2 and said["truncated"] == pytest.approx(1 / 3)
    assert truncated(settings(tmp_path), episodes) == set()


def test_sequences_after_one_that_was_cut_off_keep_the_advantage_of_their_episode(tmp_path: Path):
    config = settings(tmp_path, algorithm={"name": "dr_grpo", "mask_truncated": True})
    prompt = Prompt(0, [1], {})

    def sequence(reward: float, finish: Any, part: int) -> Episode:
        return Episode(prompt, 0, [Turn([5, 6], [-1.0, -1.0], finish)], reward=reward, part=part)

    episodes = [sequence(1.0, "length", 0), sequence(1.0, "stop", 1), sequence(0.0, "stop", 0), sequence(0.0, "length", 1)]
    rollout = Rollout.of(episodes, (), truncated(config, episodes))
    assert rollout.flat.mask_N.tolist() == [0, 0, 1, 1, 1, 1, 0, 0]
    assert advantages(config.algorithm, rollout, None, None, 0.0)[0].tolist() == [0, 0, 0.5, 0.5, -0.5, -0.5, 0, 0]
