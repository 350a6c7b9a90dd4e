"""Runs whose environments show pictures: exact after a kill, without pause, with a critic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray
from support.configs import here, settings
from support.ray_actors import when
from support.sighted import sighted

from trainer import train_ppo
from trainer.compare import compare
from trainer.configs.ppo import PpoConfig
from trainer.environments import chromium
from trainer.errors import ConfigError, RunError
from trainer.metrics import read
from trainer.page import episodes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sighted("qwen2_5_vl", tmp_path_factory.mktemp("model"))


def played(model: Path, **changes: Any) -> PpoConfig:
    given: dict[str, Any] = {
        "data": {"path": "trainer.data.shapes:shapes", "args": {"rows": 40, "asked": ["colour"]}, "max_prompt_tokens": 32},
        "environment": {"function": "support.environments:shots", "max_turns": 4, "max_tokens": 60},
        "reward": {"function": "exact"},
        "trainer": {"eval_prompts": 4, "steps": 4, "prompts_per_step": 4, "micro_batch_tokens": 200},
    }
    return settings(model, **{key: {**given.get(key, {}), **changes.get(key, {})} for key in given | changes})


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    assert train_ppo.train(here(played(model)), folder) == 0
    return folder


def test_a_run_learns_from_what_it_saw_after_its_turns(whole):
    rows = read(whole)[1:]
    assert [row["turns"] for row in rows] == [2.0] * 4
    assert all(row["logprob_diff"] < 1e-4 for row in rows), "engines and ranks see the same"
    assert any(row["grad_norm"] > 0 for row in rows)
    [row, *_] = episodes.page(whole, {"whole": "1"})["rows"]
    found = episodes.whole(whole, row["id"])
    prompt, turn = found["whole"]["pictures"], found["whole"]["turns"][1]["pictures"]
    assert {one["hash"] for one in (*prompt, *turn)} == set(found["shown"]) and len(found["shown"]) == 2


@pytest.mark.wide
@pytest.mark.usefixtures("cluster")
def test_killed_at_any_moment_it_computes_the_same_bits(model, whole, tmp_path):
    killer = when((tmp_path / "checkpoints" / "step_2").exists, lambda: ray.kill(ray.get_actor("policy-0")))
    with pytest.raises(RunError, match="policy-0"):
        train_ppo.train(played(model), tmp_path)
    killer.join(10)
    assert train_ppo.train(played(model), tmp_path) == 0
    assert all(not result.different for result in compare(read(whole), read(tmp_path)))
    assert (whole / "model/model.safetensors").read_bytes() == (tmp_path / "model/model.safetensors").read_bytes()
    for file in ("metrics.jsonl", "episodes.db"):
        assert b"\x89PNG" not in (tmp_path / file).read_bytes()
    kept = [file for file in (tmp_path / "checkpoints").rglob("*") if file.is_file()]
    assert kept and not any(b"\x89PNG\r\n" in file.read_bytes() for file in kept)


@pytest.mark.parametrize("mode", ["one_step", "async"])
def test_episodes_without_pause_carry_their_pictures(model, tmp_path, mode):
    assert train_ppo.train(here(played(model, rollout={"mode": mode})), tmp_path) == 0
    rows = read(tmp_path)[1:]
    assert [row["turns"] for row in rows] == [2.0] * 4
    assert rows[0]["logprob_diff"] < 1e-4


def test_a_critic_and_a_reference_see_the_same(model, tmp_path):
    more = {"algorithm": {"name": "ppo", "group_size": 1, "kl": {"coef": 0.1}}, "trainer": {"steps": 2}}
    assert train_ppo.train(here(played(model, **more)), tmp_path) == 0
    rows = read(tmp_path)[1:]
    assert all(row["logprob_diff"] < 1e-4 and abs(row["kl"]) < 1 for row in rows)
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-5)


def test_more_pictures_than_may_be_end_the_episode_or_the_run_by_setting(model, tmp_path):
    assert train_ppo.train(here(played(model, data={"max_images": 1}, trainer={"steps": 1})), tmp_path / "limited") == 0
    assert read(tmp_path / "limited")[1]["limited"] == 1
    wrong = played(model, data={"max_images": 1}, environment={"on_limit": "error"})
    said = r"support\.environments:shots on row \d+: reached a limit: turn 2 would show 2 pictures \(data\.max_images is 1\)"
    with pytest.raises(ConfigError, match=said):
        train_ppo.train(here(wrong), tmp_path / "error")


def test_a_text_model_that_is_shown_pictures_ends_the_run_with_the_row(tiny_model, tmp_path):
    rows = {"path": "support.environments:rows", "args": {"count": 60}, "max_prompt_tokens": 8}
    with pytest.raises(
        ConfigError, match=r"shots on row \d+: the observation before turn 2 has a picture: the policy has no processor that reads pictures"
    ):
        train_ppo.train(here(played(tiny_model, data=rows)), tmp_path)


@pytest.mark.wide
@pytest.mark.skipif(chromium.program() is None, reason=f"no Chromium: {chromium.MISSING}")
def test_a_run_plays_pages_in_a_browser(model, tmp_path):
    more: dict[str, Any] = {
        "data": {"path": "support.environments:pages", "args": {"rows": 8}},
        "environment": {"function": "screen", "args": {"width": 64, "height": 64, "system": ""}, "max_turns": 2, "max_tokens": 100},
        "trainer": {"steps": 1, "eval_prompts": 0},
    }
    assert train_ppo.train(here(played(model, **more)), tmp_path) == 0
    row = read(tmp_path)[-1]
    assert row["environment/no_actions"] == 2 and row["limited"] == 0 and row["logprob_diff"] < 1e-4
