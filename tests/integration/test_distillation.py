"""On-policy distillation through whole runs: real Ray actors, DeepSpeed on gloo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.configs import here, settings
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from trainer import train_ppo
from trainer.cli import parse
from trainer.configs.ppo import PpoConfig
from trainer.metrics import read

RECIPES = Path(__file__).parents[2] / "trainer/recipes"


@pytest.fixture(scope="module")
def teacher(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of other weights than the policy, and sure of what it says."""
    folder = tmp_path_factory.mktemp("teacher")
    torch.manual_seed(7)
    lm = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny_model), dtype=torch.float32)
    lm.get_output_embeddings().weight.data.mul_(20)
    lm.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder


def distilling(path: Path, teach: Path, **changes: Any) -> PpoConfig:
    more = {"algorithm": {"name": "distillation"}, "teacher": {"path": str(teach)}, "reward": {"function": "none"}, "optim": {"lr": 1e-2}}
    return settings(path, **{key: {**more.get(key, {}), **changes.get(key, {})} for key in {**more, **changes}})


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_two_ranks_with_a_sharded_teacher_compute_what_one_does_and_a_resumed_run_too(tiny_model, teacher, tmp_path):
    assert train_ppo.train(here(distilling(tiny_model, teacher)), tmp_path / "one") == 0
    changes: dict[str, Any] = {"trainer": {"zero_stage": 3, "steps": 4}, "placement": {"ranks": 2}}
    assert train_ppo.train(distilling(tiny_model, teacher, **changes), tmp_path / "two") == 0
    changes["trainer"]["steps"] = 6  # from a checkpoint
    assert train_ppo.train(distilling(tiny_model, teacher, **changes), tmp_path / "two") == 0
    one, two = (read(tmp_path / name)[1:] for name in ("one", "two"))
    assert len(one) == 6
    for row, alone in zip(two, one, strict=True):
        assert row["divergence"] == pytest.approx(alone["divergence"], rel=1e-3)
        assert row["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-2)
    assert one[-1]["divergence"] < 0.8 * one[0]["divergence"]
    assert {row["reward"] for row in one} == {0.0}


def test_a_teacher_beside_a_reward_adds_to_the_loss(tiny_model, teacher, tmp_path):
    changes: dict[str, Any] = {"algorithm": {"name": "grpo"}, "reward": {"function": "digits_share"}, "trainer": {"steps": 1}}
    rows = []
    for coef in (1.0, 3.0):
        folder = tmp_path / str(coef)
        assert train_ppo.train(here(distilling(tiny_model, teacher, **changes, teacher={"coef": coef})), folder) == 0
        rows.append(read(folder)[-1])
    assert rows[0]["divergence"] == pytest.approx(rows[1]["divergence"])
    assert rows[1]["loss"] - rows[0]["loss"] == pytest.approx(2 * rows[0]["divergence"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.usefixtures("cluster")
def test_a_student_closes_nine_tenths_of_the_gap_to_its_teacher(tmp_path, monkeypatch, beta):
    """The demo's task: 60 and 400 supervised steps make the two."""
    monkeypatch.setenv("FLOTILLA_RUNS", str(tmp_path))
    for name, steps in (("student", 60), ("teacher", 400)):
        argv = ["--config", str(RECIPES / "demo-sft.yaml"), f"run.name={name}", f"trainer.steps={steps}", "log.plot=false"]
        subprocess.run([sys.executable, "-m", "trainer.train_sft", *argv], check=True, timeout=300)
    scores = {}
    for name, more in (("teacher", ["trainer.steps=1", "optim.lr=1e-12"]), ("student", [f"teacher.beta={beta}"])):
        fast = ["rollout.engine=hf", "rollout.max_sequences=null", "log.plot=false", f"run.name=from-{name}"]
        argv = ["--config", str(RECIPES / "demo-distill.yaml"), f"model.path=run:{name}", "teacher.path=run:teacher", *fast, *more]
        assert train_ppo.train(parse(argv, prog="test", model=PpoConfig), tmp_path / f"from-{name}") == 0
        rewards = [row["eval_reward"] for row in read(tmp_path / f"from-{name}") if "eval_reward" in row]
        scores[name] = rewards[0], rewards[-1]
    best, (before, after) = scores["teacher"][0], scores["student"]
    assert best - before > 0.2, "no gap to close"
    assert after - before >= 0.9 * (best - before)
