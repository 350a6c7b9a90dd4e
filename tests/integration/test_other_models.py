"""A run with a critic from a reward model, a reference of its own, and answers that it does not learn from."""

from __future__ import annotations

from typing import Any

from support.configs import here, settings
from transformers import AutoModelForSequenceClassification

from trainer import models, train_ppo
from trainer.metrics import read


def test_a_critic_begins_as_a_reward_model_and_learns_before_the_policy_does(tiny_model, wide_model, tmp_path):
    scores = tmp_path / "scores"
    AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1).save_pretrained(scores)
    models.load_tokenizer(settings(tiny_model).model).save_pretrained(scores)
    changes: dict[str, Any] = {
        "algorithm": {"name": "ppo", "group_size": 1, "mask_truncated": True, "kl": {"coef": 1e-3, "reference": str(wide_model)}},
        "critic": {"path": str(scores), "head_start": 2, "lr": 1e-3},
        "trainer": {"steps": 4, "prompts_per_step": 32, "checkpoint_every": 1, "export_every": 1, "eval_prompts": 0},
    }
    assert train_ppo.train(here(settings(tiny_model, **changes)), tmp_path / "run") == 0
    rows = read(tmp_path / "run")
    assert [row["lr"] for row in rows] == [0.0, 0.0, 1e-3, 1e-3] and all(row["value_grad_norm"] > 0 for row in rows)
    assert all(row["kl"] > 0.01 for row in rows), "the reference is another model from the first step on"
    weights = [(tmp_path / f"run/models/step_{step}/model.safetensors").read_bytes() for step in (1, 2, 3)]
    assert weights[0] == weights[1] != weights[2]
