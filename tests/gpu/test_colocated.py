"""A run whose ranks and rollout engine share one real GPU in turns."""

from __future__ import annotations

import os
from typing import Any

import pytest
import ray
import torch
from configs import settings

from trainer import train_ppo
from trainer.metrics import read

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")]
COLOCATED: dict[str, Any] = {
    "model": {"dtype": "bfloat16"},
    "rollout": {"engine": "vllm", "gpu_memory": 0.3, "options": {"enforce_eager": True}, "max_logprob_diff": None},
    "trainer": {"zero_stage": 2},
    "placement": {"gpus_per_rank": 1, "colocate": True},
}


def test_a_colocated_run_trains_and_engine_and_policy_agree_at_every_step(wide_model, tmp_path, capfd):
    os.environ["RAY_AUTH_MODE"] = "disabled"
    ray.init(include_dashboard=False, log_to_driver=False)
    try:
        config = settings(wide_model, **COLOCATED, algorithm={"kl": {"coef": 0.01}})
        assert train_ppo.train(config, tmp_path) == 0
    finally:
        ray.shutdown()
    rows = read(tmp_path)
    assert [row["step"] for row in rows] == list(range(7))
    assert all(row["logprob_diff"] < 0.05 for row in rows[1:]), "bfloat16 kernels of vLLM and transformers differ by less"
    assert all(row["seconds_turn"] > 0 for row in rows[1:])
    assert "memory of a GPU, training: " in capfd.readouterr().out
