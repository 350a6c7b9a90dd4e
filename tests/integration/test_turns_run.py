"""Ranks and rollout engines that take turns on the same devices: the same bits as apart, also when one of them dies."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import ray
from support.configs import here, settings
from support.ray_actors import until_gone

from lab.waiting import wait_for
from trainer import train_ppo
from trainer.compare import compare
from trainer.errors import RunError
from trainer.metrics import read
from trainer.online import processes
from trainer.rollout.engines import RolloutEngines

pytestmark = [pytest.mark.wide, pytest.mark.usefixtures("cluster")]


def same_bits(plain: Path, turns: Path) -> None:
    assert all(not result.different for result in compare(read(plain), read(turns)))
    assert (plain / "model" / "model.safetensors").read_bytes() == (turns / "model" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("zero_stage", "deaths"),
    [
        (0, {2: "wake weights", 3: "sleep", 4: "wake kv_cache"}),  # asleep, awake with ranks that need it away, with weights received
        pytest.param(2, {}, marks=pytest.mark.slow),
        pytest.param(3, {}, marks=pytest.mark.slow),
    ],
)
def test_ranks_and_rollout_engines_that_take_turns_compute_the_same_bits(tiny_model, tmp_path, monkeypatch, zero_stage, deaths):
    """Also when the rollout engine dies: at a step, before it is asked for something."""
    plain, turns, at = tmp_path / "plain", tmp_path / "turns", dict(deaths)
    changes: dict[str, Any] = {
        "algorithm": {"kl": {"coef": 0.1 if zero_stage < 3 else 0}},
        "trainer": {"steps": max({2, *at}), "zero_stage": zero_stage},
    }
    assert train_ppo.train(here(settings(tiny_model, **changes)), plain) == 0
    order: list[str] = []
    original = RolloutEngines._call
    workers: list[processes.WorkerGroups] = []
    begin = processes.WorkerGroups.to_ranks

    def call(self: RolloutEngines, method: str, *args: Any) -> None:
        what = " ".join((method, *args))
        if workers and at.get(workers[0].learned + 1) == what:
            at.pop(workers[0].learned + 1)
            ray.kill(ray.get_actor("rollout-0"))
        original(self, method, *args)
        order.append(what)

    monkeypatch.setattr(RolloutEngines, "_call", call)
    monkeypatch.setattr(processes.WorkerGroups, "to_ranks", lambda self: [workers.append(self), begin(self)][1])
    assert train_ppo.train(settings(tiny_model, **changes, placement={"colocate": True}), turns) == 0
    assert not at, f"was not reached: {at}"
    assert order[:3] == ["sleep", "sleep", "wake weights"] and set(order) == {"sleep", "wake weights", "wake kv_cache"}
    same_bits(plain, turns)


@pytest.mark.slow
def test_turns_with_vllm_compute_the_same_bits(wide_model, tmp_path):
    pytest.importorskip("vllm", reason="vLLM is not installed (make install)")
    plain, turns = tmp_path / "plain", tmp_path / "turns"
    changes: dict[str, Any] = {"rollout": {"engine": "vllm"}, "trainer": {"steps": 2, "zero_stage": 2}}
    assert train_ppo.train(settings(wide_model, **changes), plain) == 0
    until_gone()
    assert train_ppo.train(settings(wide_model, **changes, placement={"colocate": True}), turns) == 0
    same_bits(plain, turns)


def test_a_run_that_takes_turns_and_loses_a_rank_resumes_to_the_same_bits(tiny_model, tmp_path):
    plain, turns = tmp_path / "plain", tmp_path / "turns"
    assert train_ppo.train(here(settings(tiny_model)), plain) == 0
    colocated = settings(tiny_model, placement={"colocate": True})

    def kill() -> None:
        wait_for("a checkpoint", (turns / "checkpoints" / "step_2").exists, 120, every=0.005)
        ray.kill(ray.get_actor("policy-0"))

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    with pytest.raises(RunError, match="died"):
        train_ppo.train(colocated, turns)
    killer.join(10)
    assert read(turns)[-1]["step"] < 6
    until_gone()
    assert train_ppo.train(colocated, turns) == 0
    same_bits(plain, turns)
