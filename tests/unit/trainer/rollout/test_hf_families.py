"""Families of models in the engine on transformers: log-probabilities of its answers are the model's own, also after a weight sync."""

from __future__ import annotations

import asyncio

import pytest
import torch
from support.families import FAMILIES, RECURRENT, exported
from transformers import AutoModelForCausalLM

from trainer import models
from trainer.configs.ppo import PpoConfig
from trainer.configs.sections import ModelConfig
from trainer.episodes import Prompt
from trainer.errors import ConfigError
from trainer.online.processes import _require_cache
from trainer.rollout import Sampling, sample
from trainer.rollout.hf import HfEngine

PROMPTS = [Prompt(0, [3, 4, 5], {}), Prompt(1, [13, 6, 6, 7, 8, 9, 14], {}), Prompt(2, [10], {})]


def settings(path: str) -> PpoConfig:
    return PpoConfig.model_validate(
        {
            "model": {"path": path, "dtype": "float32", "attention": "eager"},
            "data": {"path": "a:b", "max_prompt_tokens": 16},
            "rollout": {"engine": "hf", "max_new_tokens": 8, "max_sequences": 64},
            "placement": {"gpus_per_rank": 0},
        }
    )


@torch.no_grad()
def difference(engine: HfEngine, lm: torch.nn.Module) -> float:
    """Largest of a token's log-probability."""
    found = []
    for episode in asyncio.run(sample(engine, PROMPTS, [0, 1, 2], Sampling(8, samples=3), 3)):
        prompt, answer = episode.prompt.token_ids, episode.response_ids
        logits = lm(input_ids=torch.tensor([prompt + answer]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        expected = logits.float().log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]
        found.append(float((torch.tensor(episode.logprobs) - expected).abs().max()))
    return max(found)


@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind not in RECURRENT])
def test_log_probabilities_are_the_models_own_before_and_after_a_weight_sync(tmp_path, kind):
    path = exported(kind, tmp_path / "model")
    lm = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    engine = HfEngine(settings(str(path)), str(path), 0)
    assert difference(engine, lm) < 1e-4
    tensors = models.saved_tensors(lm)
    with torch.no_grad():
        for tensor in tensors.values():
            if tensor.is_floating_point():
                tensor.add_(torch.randn_like(tensor) * 0.05)
    engine.load([(name, tensor.detach().clone()) for name, tensor in tensors.items()])
    engine.loaded(1)
    assert difference(engine, lm) < 1e-4


@pytest.mark.parametrize("kind", sorted(RECURRENT))
def test_recurrent_layers_are_refused(tmp_path, kind):
    path = str(exported(kind, tmp_path / "model"))
    lm = models.without_weights(ModelConfig.model_validate({"path": path, "attention": "eager"}))
    with pytest.raises(ConfigError, match=rf"^rollout\.engine=hf: {kind} has recurrent layers"):
        _require_cache(settings(path), lm)
