"""Rewards that fail while the run goes on: deadlines of one answer, tries, zero and drop, and a stop that does not wait for them."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest
import torch

from trainer.cli.changes import differences
from trainer.cluster.stopping import Stopped, Stopping
from trainer.configs.algorithm import AlgorithmConfig
from trainer.configs.ppo import PpoConfig
from trainer.configs.reward import RewardConfig
from trainer.data.packing import flatten
from trainer.episodes import Episode, Prompt, Turn
from trainer.errors import ConfigError
from trainer.objectives.advantages import estimate
from trainer.online.roles import Rollout
from trainer.online.scored import advantages, describe, left_out
from trainer.rewards.scorer import Scorer


def episodes(*texts: str, per_group: int = 1, **row: Any) -> list[Episode]:
    return [
        Episode(Prompt(10 + i, [1, 2], row), i // per_group, [Turn([i] * (i + 1), [0.0] * (i + 1), "stop")], text=text)
        for i, text in enumerate(texts)
    ]


def scored(function: str, batch: list[Episode], **settings: Any) -> list[tuple[float, bool]]:
    config = RewardConfig.model_validate({"function": f"support.judges:{function}", "timeout": 60, "on_error": "zero"} | settings)
    with Scorer(config) as rewards:
        values = rewards.score(batch, step=3)
        assert [worker.owed for worker in rewards.workers] == [{}] * config.workers
    assert values == [e.reward for e in batch]
    return [(e.reward, e.failed) for e in batch]


RIGHT, WRONG = (1.0, False), (0.0, True)


@pytest.mark.parametrize(("function", "workers"), [("waits", 1), ("waits", 2), ("never", 1), ("crashes_on_b", 1), ("partly", 1)])
def test_one_answer_fails_and_the_others_are_scored(function: str, workers: int, capsys: pytest.CaptureFixture[str]):
    result = scored(function, episodes(*"abcbd"), answer_timeout=0.5, workers=workers)
    assert result == [RIGHT, WRONG, RIGHT, WRONG, RIGHT]
    said = capsys.readouterr().out
    assert said.startswith(
        f"step 3: 2 of 5 rewards failed (reward.on_error=zero); the first: reward.function: {function} on row 11 with the text 'b'"
    )
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("waits", r"did not end within 0\.5 s \(reward\.answer_timeout; judges\.py:\d+\)$"),
        ("never", r"did not end within 0\.5 s \(reward\.answer_timeout\)$"),
    ],
)
def test_an_answer_that_is_late_ends_the_run_unless_settings_say_otherwise(function: str, reason: str):
    with pytest.raises(TimeoutError, match=f"{function} on row 11 with the text 'b' {reason}"):
        scored(function, episodes(*"abc"), answer_timeout=0.5, on_error="fail")


def test_an_async_reward_that_blocks_its_loop_fails_what_is_in_flight():
    assert scored("blocks", episodes(*"abc"), answer_timeout=0.5)[1] == WRONG


@pytest.mark.parametrize("function", ["stays", "refuses", "too_few"])
def test_a_batched_reward_fails_as_a_whole(function: str):
    assert scored(function, episodes(*"abc"), answer_timeout=0.5) == [WRONG] * 3


def test_a_batch_that_is_late_fails_what_is_left_and_the_next_has_new_processes(capsys: pytest.CaptureFixture[str]):
    with Scorer(RewardConfig(function="support.judges:waits", timeout=5, on_error="drop")) as rewards:
        rewards.score(batch := episodes(*"abc"))
        assert [e.failed for e in batch] == [False, True, True]
        rewards.score(again := episodes(*"aca"))
        assert [e.failed for e in again] == [False] * 3
    assert "did not end within 5 s (reward.timeout; judges.py:" in capsys.readouterr().out


@pytest.mark.parametrize("function", ["flaky", "flaky_later", "flaky_group"])
def test_a_reward_that_fails_is_tried_again(function: str):
    assert scored(function, episodes("a", failures=2), retries=2) == [RIGHT]
    assert scored(function, episodes("a", failures=2), retries=1) == [WRONG]


def test_a_reward_that_hangs_is_tried_again_in_a_new_process(tmp_path):
    batch = episodes(*"abc", file=str(tmp_path / "been-"))
    assert scored("waits_once", batch, retries=1, answer_timeout=0.5, on_error="fail") == [RIGHT] * 3


def test_a_batch_of_which_nothing_is_left_is_an_error():
    with pytest.raises(ConfigError, match=r"^reward\.on_error=drop: 2 of 2 rewards failed; the first: .* raised KeyError\('solution'\)"):
        scored("missing_column", episodes(*"ab"), on_error="drop")


def test_a_stop_does_not_wait_for_a_reward_that_hangs(monkeypatch):
    stopping = Stopping()
    stopping.signal = signal.SIGTERM
    begun = time.monotonic()
    with Scorer(RewardConfig(function="support.judges:waits", timeout=300)) as rewards:
        with pytest.raises(Stopped, match="rewards did not end within 2 s of SIGTERM"):
            rewards.score(episodes("b"), 1, stopping)
        assert time.monotonic() - begun < 60
        monkeypatch.setattr("trainer.rewards.scorer.STOP_SECONDS", 60)  # for a new process to start, on a busy machine
        assert rewards.score(episodes("a"), 1, stopping) == [1.0]  # what ends soon is still waited for


def batch_of(rewards: list[float], failed: set[int], per_group: int = 2) -> list[Episode]:
    batch = episodes(*"abcdefgh"[: len(rewards)], per_group=per_group)
    for i, (episode, reward) in enumerate(zip(batch, rewards, strict=True)):
        episode.reward, episode.failed = (0.0, True) if i in failed else (reward, False)
    return batch


def config(name: str = "grpo", on_error: str = "drop", **algorithm: Any) -> PpoConfig:
    values = {
        "model": {"path": "x"},
        "data": {"path": "a.b:c"},
        "algorithm": {"name": name, "group_size": 2, **algorithm},
        "reward": {"on_error": on_error},
    }
    return PpoConfig.model_validate(values)


def test_only_dropped_answers_and_those_left_alone_are_left_out():
    batch = batch_of([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], {0, 2, 3})
    assert left_out(config(), batch) == {0, 1, 2, 3}
    assert left_out(config("ppo"), batch) == {0, 2, 3}
    assert left_out(config("reinforce_plus_plus", baseline=False), batch) == {0, 2, 3}
    assert left_out(config(on_error="zero"), batch) == set()
    with pytest.raises(ConfigError, match="failed rewards leave no group with 2 answers to learn from"):
        left_out(config(), batch_of([1.0, 2.0, 3.0, 4.0], {0, 2}))


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus"])
def test_the_others_of_a_group_are_compared_as_if_the_dropped_one_had_not_been_sampled(name):
    batch = batch_of([1.0, 2.0, 4.0, 1.0, 0.0, 7.0], {1}, per_group=3)
    algorithm = AlgorithmConfig(name=name)
    found_N, _ = advantages(algorithm, Rollout.of(batch, {1}), None, None, 0.0)
    rest = [e for e in batch if not e.failed]
    flat = flatten(rest)
    alone_N, _ = estimate(
        algorithm, torch.tensor([e.reward for e in rest]), torch.tensor([e.group for e in rest]), flat.lengths_E, flat.mask_N
    )
    assert found_N.tolist() == [*alone_N[:1].tolist(), 0.0, 0.0, *alone_N[1:].tolist()]


def test_the_mask_of_a_dropped_answer_is_zero_throughout():
    rollout = Rollout.of(batch_of([1.0, 2.0, 3.0, 4.0], {1}), {1})
    assert rollout.flat.mask_N.tolist() == [1, 0, 0, 1, 1, 1, 1, 1, 1, 1]
    assert describe(rollout, RewardConfig(on_error="drop"))["reward"] == pytest.approx(8 / 3)
    assert describe(rollout, RewardConfig(on_error="drop"))["reward_failed"] == 0.25
    assert "reward_failed" not in describe(rollout, RewardConfig())


def test_deadlines_and_tries_change_no_run_but_what_failing_means_does():
    old = config(on_error="fail")
    new = config(on_error="zero").model_copy(update={"reward": RewardConfig(on_error="zero", retries=3, answer_timeout=5)})
    assert differences(old, new) == {"reward.on_error": ("fail", "zero")}
