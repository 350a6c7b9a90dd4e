"""A mixture of experts under torchrun: ZeRO stage 3 over two ranks, with routers that learn and with frozen ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from offline_runs import train_here
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from trainer.cluster.actors import free_port

ROOT = Path(__file__).resolve().parents[2]
MODEL = (
    "{model_type: qwen3_moe, hidden_size: 64, moe_intermediate_size: 64, num_local_experts: 4, num_experts_per_tok: 2, "
    "num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 256}"
)
SETTINGS = [
    *("--config", "trainer/recipes/demo-sft.yaml", f"model.init={MODEL}", "data.args.length=4", "trainer.steps=6"),
    *("trainer.prompts_per_step=16", "trainer.micro_batch_tokens=100", "trainer.checkpoint_every=3", "placement.threads=1"),
    *("log.plot=false", "log.tensorboard=false"),
]


def train(runs: Path, name: str, ranks: int, *settings: str) -> list[dict[str, float]]:
    words = [*SETTINGS, f"run.name={name}", *settings]
    if ranks == 1:
        train_here("sft", runs, *words)
    else:
        launch = [
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            str(ranks),
            "--master-port",
            str(free_port()),
            "-m",
            "trainer.train_sft",
        ]
        env = os.environ | {"FLOTILLA_RUNS": str(runs)}
        done = subprocess.run(
            [sys.executable, *launch, *words], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (runs / name / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.wide
@pytest.mark.parametrize("frozen", [(), pytest.param(("model.freeze=[mlp.gate]",), marks=pytest.mark.slow)], ids=["routers", "frozen"])
def test_two_ranks_of_zero_3_learn_what_one_without_it_does(tmp_path, frozen):
    whole = train(tmp_path, "one", 1, "trainer.zero_stage=0", *frozen)
    shared = train(tmp_path, "two", 2, "trainer.zero_stage=3", *frozen)
    for one, two in zip(whole, shared, strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-4) and two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)
    assert whole[-1]["loss"] < whole[0]["loss"] - 0.2
    begun = train(tmp_path, "begun", 1, "trainer.steps=1", "optim.lr=1e-12", "optim.warmup_steps=0")
    assert begun[0]["loss"] == whole[0]["loss"] or frozen, "the same random weights"
    before, after = (load_file(tmp_path / run / "model/model.safetensors") for run in ("begun", "two"))
    routers = [name for name in before if name.endswith("mlp.gate.weight")]
    assert len(routers) == 2 and all(torch.equal(before[name], after[name]) == bool(frozen) for name in routers)
    experts = [name for name in before if ".experts." in name]
    assert experts and not any(torch.equal(before[name], after[name]) for name in experts)
    AutoModelForCausalLM.from_pretrained(tmp_path / "two/model")
