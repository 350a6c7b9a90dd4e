"""A run whose ranks and rollout engine share one real GPU in turns."""

from __future__ import annotations

import os

import pytest
import ray
import torch
from support.configs import ON_ONE_GPU, settings

from trainer import train_ppo
from trainer.metrics import read

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")]


def test_a_colocated_run_trains_and_engine_and_policy_agree_at_every_step(wide_model, tmp_path, capfd):
    os.environ["RAY_AUTH_MODE"] = "disabled"
    ray.init(include_dashboard=False, log_to_driver=False)
    try:
        config = settings(wide_model, **ON_ONE_GPU, algorithm={"kl": {"coef": 0.01}})
        assert train_ppo.train(config, tmp_path) == 0
    finally:
        ray.shutdown()
    rows = read(tmp_path)
    assert [row["step"] for row in rows] == list(range(7))
    assert all(row["logprob_diff"] < 0.05 for row in rows[1:]), "bfloat16 kernels of vLLM and transformers differ by less"
    assert all(row["seconds_turn"] > 0 for row in rows[1:])
    assert "memory of a GPU, training: " in capfd.readouterr().out
