"""Runs of a mixture of experts whose policy takes the experts that its tokens took in the engine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.configs import here, settings
from support.families import exported
from support.paths import python_path

from trainer import train_ppo
from trainer.compare import compare
from trainer.configs.ppo import PpoConfig
from trainer.metrics import read
from trainer.online import roles

ROOT = Path(__file__).resolve().parents[2]
CHANGES: dict[str, Any] = {
    "rollout": {"router_replay": "required"},
    "algorithm": {"epochs": 2, "minibatches": 2},
    "optim": {"lr": 1e-2},
    "trainer": {"steps": 8, "export_every": None, "eval_prompts": 0},
}
KILLED = """
import os, signal, sys, threading, time
from pathlib import Path
from support.configs import here, settings
from trainer import train_ppo

def kill():
    while not (folder / "checkpoints" / "step_2").exists():
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)

folder = Path(sys.argv[2])
threading.Thread(target=kill, daemon=True).start()
train_ppo.train(here(settings(Path(sys.argv[1]), **eval(sys.argv[3]))), folder)
"""


@pytest.mark.wide
def test_a_killed_run_resumes_with_the_same_bits_and_each_epoch_keeps_what_was_recorded(tmp_path):
    path, whole, killed = exported("mixtral", tmp_path / "mixtral"), tmp_path / "whole", tmp_path / "killed"
    assert train_ppo.train(here(settings(path, **CHANGES)), whole) == 0
    rows = read(whole)
    assert all(0 < row["rerouted"] < 0.9 for row in rows), "after the first update the router would choose others"
    assert all(row["logprob_diff"] < 1e-2 for row in rows[:1])
    command, env = [sys.executable, "-c", KILLED, str(path), str(killed), repr(CHANGES)], {"PYTHONPATH": python_path(ROOT / "tests", ROOT)}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == -9, done.stderr
    assert train_ppo.train(here(settings(path, **CHANGES)), killed) == 0
    again = read(killed)
    assert all(not result.different for result in compare(rows, again)), [r for r in compare(rows, again) if r.different]
    assert (whole / "model" / "model.safetensors").read_bytes() == (killed / "model" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_over_turns_with_what_an_environment_says_all_tokens_but_the_last_have_a_record(tmp_path, monkeypatch, engine):
    path, records = exported("mixtral", tmp_path / "mixtral"), []

    def noted(episode: Any, of: Any = roles.experts_of) -> Any:
        records.append((episode, of(episode)))
        return records[-1][1]

    monkeypatch.setattr(roles, "experts_of", noted)
    values = {
        "model": {"path": str(path), "dtype": "float32", "attention": "eager"},
        "data": {"path": "support.environments:rows", "args": {"count": 40}, "max_prompt_tokens": 8},
        "environment": {"function": "support.environments:two_turns", "max_turns": 2, "args": {"seconds": 0}},
        "algorithm": {"group_size": 4},
        "rollout": {"engine": engine, "max_new_tokens": 5, "router_replay": "required"},
        "trainer": {"steps": 2, "prompts_per_step": 8, "eval_prompts": 0, "micro_batch_tokens": 64},
        "placement": {"gpus_per_rank": 0, "processes": "one"},
        "log": {"tensorboard": False, "plot": False},
    }
    assert train_ppo.train(PpoConfig.model_validate(values), tmp_path / "run") == 0
    assert all(row["rerouted"] == 0 and row["logprob_diff"] < 1e-4 for row in read(tmp_path / "run"))
    assert any(len([t for t in episode.turns if t.sampled]) == 2 for episode, _ in records)
    for episode, record in records:
        assert len(record) == len(episode.prompt.token_ids) + len(episode.response_ids) - 1
        assert (record != np.iinfo(record.dtype).max).all()
