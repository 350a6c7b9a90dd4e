"""A run goes on with another number of ranks than wrote its checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer import train_ppo
from trainer.checkpoints import reshard
from trainer.checkpoints.folders import Checkpoint
from trainer.cluster.actors import free_port
from trainer.configs.ppo import PpoConfig
from trainer.errors import ConfigError, RunError
from trainer.metrics import read

ROOT = Path(__file__).resolve().parents[2]


def settings(model: Path, ranks: int, steps: int) -> PpoConfig:
    return PpoConfig.model_validate(
        {
            "model": {"path": str(model), "dtype": "float32"},
            "data": {"path": "trainer.data.tasks:sort_digits", "args": {"rows": 200, "length": 3}, "max_prompt_tokens": 8},
            "algorithm": {"name": "ppo", "group_size": 2},
            "critic": {"lr": 1e-3},
            "reward": {"function": "digits_share"},
            "rollout": {"engine": "hf", "max_new_tokens": 5},
            "optim": {"lr": 1e-3},
            "trainer": {"steps": steps, "prompts_per_step": 12, "zero_stage": 2, "checkpoint_every": 2, "eval_prompts": 8},
            "placement": {"ranks": ranks, "gpus_per_rank": 0, "threads": 1, "wait": 20},
            "log": {"tensorboard": False, "plot": False},
        }
    )


@pytest.mark.slow
def test_from_four_ranks_to_two_to_three_and_back_the_curve_is_that_of_four(cluster, tiny_model, tmp_path, capfd):
    """Policy and critic, with their optimizers: both are sharded."""
    assert train_ppo.train(settings(tiny_model, 4, 8), tmp_path / "whole") == 0
    for ranks, steps in ((4, 2), (2, 4), (3, 6), (4, 8)):
        assert train_ppo.train(settings(tiny_model, ranks, steps), tmp_path / "cut") == 0
    said = capfd.readouterr().out
    assert all(f"was written with {a} ranks: it is cut anew for {b} ranks\n" in said for a, b in ((4, 2), (2, 3), (3, 4)))
    for row, undisturbed in zip(read(tmp_path / "cut")[1:], read(tmp_path / "whole")[1:], strict=True):
        for name in ("reward", "loss", "grad_norm", "value_loss", "value_grad_norm", "lr"):
            assert row[name] == pytest.approx(undisturbed[name], rel=1e-3, abs=1e-5), (row["step"], name)
    assert not (tmp_path / "cut" / "checkpoints" / reshard.NAME).exists()


@pytest.mark.parametrize(
    ("dtype", "stage", "rank"),
    [
        pytest.param("float32", 3, None, marks=pytest.mark.wide),
        pytest.param("bfloat16", 1, None, marks=pytest.mark.slow),
        pytest.param("float32", 0, None, marks=pytest.mark.slow),
        pytest.param("float32", 3, 4, marks=pytest.mark.slow),
        pytest.param("bfloat16", 1, 4, marks=pytest.mark.slow),
    ],
)
def test_fine_tuning_goes_on_with_one_rank_where_two_were(tmp_path, dtype, stage, rank):
    def sft(ranks: int, steps: int, name: str) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--master-addr=127.0.0.1"]
        command += [f"--master-port={free_port()}", "-m", "trainer.train_sft", "--config", "trainer/recipes/demo-sft.yaml"]
        command += ["data.args={rows: 400, length: 4, seed: 1}", "trainer.prompts_per_step=16", "log.tensorboard=false"]
        command += [f"run.name={name}", f"trainer.steps={steps}", f"trainer.zero_stage={stage}", f"model.lora.rank={rank or 'null'}"]
        command += [f"model.dtype={dtype}", "placement.threads=1", "optim.schedule=constant", "optim.warmup_steps=2"]
        env = os.environ | {"FLOTILLA_RUNS": str(tmp_path)}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-3000:]

    sft(1, 5, "whole")
    sft(2, 3, "cut")
    sft(1, 5, "cut")
    for row, undisturbed in zip(read(tmp_path / "cut"), read(tmp_path / "whole"), strict=True):
        rounding = 1e-4 if dtype == "float32" else 2e-2
        assert row["loss"] == pytest.approx(undisturbed["loss"], rel=rounding), row["step"]
        assert row["grad_norm"] == pytest.approx(undisturbed["grad_norm"], rel=rounding), row["step"]
        assert row["lr"] == undisturbed["lr"]


WHOLE = {"tensor_parallel": 1, "expert_parallel": 1, "zero_stage": 1}
TENSOR, EXPERT = WHOLE | {"tensor_parallel": 2}, WHOLE | {"expert_parallel": 2}


@pytest.mark.parametrize(
    ("before", "now", "why"),
    [
        (TENSOR | {"zero_stage": 3}, TENSOR | {"zero_stage": 3}, "DeepSpeed cannot put matrices together that ZeRO 3 has sharded"),
        (WHOLE | {"zero_stage": 3}, TENSOR, "DeepSpeed cannot put matrices together that ZeRO 3 has sharded"),
        (EXPERT, EXPERT | {"zero_stage": 3}, "DeepSpeed cannot convert between zero_stage 3 and others where models are cut"),
        (WHOLE, EXPERT, "DeepSpeed gives experts that are spread other names than those that are not"),
        (EXPERT, WHOLE, "DeepSpeed gives experts that are spread other names than those that are not"),
    ],
)
def test_what_deepspeed_cannot_convert_is_one_error(tmp_path, before, now, why):
    engine = tmp_path / "step_2" / "policy" / "engine"
    engine.mkdir(parents=True)
    state = {"world_size": 4, "mesh": before}
    with pytest.raises(ConfigError, match=r"^2 ranks.*: \S+step_2 was written with 4 ranks.*; go on with those, or export it") as caught:
        (engine / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"")
        reshard.reshard(Checkpoint(2, tmp_path / "step_2", state), 2, 60, now)
    assert why in str(caught.value) and "\n" not in str(caught.value)
    assert reshard.reshard(Checkpoint(2, tmp_path / "step_2", state), 4, 60, before) is None


def test_a_checkpoint_without_shards_is_for_any_number_of_ranks_and_no_parts(tmp_path):
    whole = Checkpoint(2, tmp_path / "step_2", {"world_size": 4, "mesh": WHOLE | {"zero_stage": 0}})
    assert reshard.reshard(whole, 2, 60, WHOLE) is None
    with pytest.raises(
        ConfigError, match=r"^2 ranks, trainer.tensor_parallel=2, .*: DeepSpeed cuts no checkpoint that was written without"
    ):
        reshard.reshard(whole, 2, 60, TENSOR)


def test_shards_that_cannot_be_read_are_one_error(tmp_path):
    engine = tmp_path / "step_2" / "policy" / "engine"
    engine.mkdir(parents=True)
    (engine / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"no shard")
    with pytest.raises(RunError, match=r"policy/engine: cannot be cut for another number of ranks: \S+"):
        reshard.reshard(Checkpoint(2, tmp_path / "step_2", {"world_size": 2}), 1, 60, WHOLE)
