"""The reward model's own process, in this one."""

from __future__ import annotations

import pytest
from transformers import AutoConfig, AutoModelForSequenceClassification

from trainer import models
from trainer.configs.sections import ModelConfig
from trainer.rewards.model import RewardModel

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@pytest.mark.parametrize(("kind", "kernel"), [("gemma2", "eager"), ("qwen2", "sdpa")])
def test_the_kernel_applies_all_that_the_model_does_in_attention(tmp_path, kind, kernel):
    config = AutoConfig.for_model(kind, **SMALL, vocab_size=15, num_labels=1, pad_token_id=0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    models.load_tokenizer(ModelConfig(init={"model_type": kind}, tokenizer="characters:0123456789s=")).save_pretrained(tmp_path)
    reward = RewardModel(str(tmp_path), 0, 64)
    reward.load()
    assert reward.model.config._attn_implementation == kernel
