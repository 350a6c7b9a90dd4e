"""Families of models in vLLM: its log-probabilities are the model's own, as loaded and after two weight syncs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from support.families import FAMILIES, IN_VLLM, exported
from transformers import AutoModelForCausalLM

pytest.importorskip("vllm", reason="vLLM is not installed (make install)")

from trainer import models, weights
from trainer.configs.ppo import PpoConfig
from trainer.episodes import Prompt
from trainer.errors import ConfigError
from trainer.rollout import Sampling, sample
from trainer.rollout.vllm import VllmEngine

PROMPTS = [Prompt(0, [3, 4, 5], {}), Prompt(1, [13, 6, 6, 7, 8, 9, 14], {}), Prompt(2, [10], {})]
QUICK = 3  # of each kind one: experts by their names, experts in one tensor, dense


def started(path: Path) -> VllmEngine:
    config = PpoConfig.model_validate(
        {
            "model": {"path": str(path), "dtype": "float32", "attention": "eager"},
            "data": {"path": "a:b", "max_prompt_tokens": 16},
            "rollout": {"engine": "vllm", "max_new_tokens": 12, "max_sequences": 64},
            "placement": {"gpus_per_rank": 0, "processes": "one"},
        }
    )
    return VllmEngine(config, str(path), 0)


@torch.no_grad()
def difference(engine: VllmEngine, lm: torch.nn.Module) -> float:
    """Largest of a token's log-probability."""
    found = []
    for episode in asyncio.run(sample(engine, PROMPTS, [0, 1, 2], Sampling(12, 1.0, samples=4), 3)):
        prompt, answer = episode.prompt.token_ids, episode.response_ids
        logits = lm(input_ids=torch.tensor([prompt + answer]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        expected = logits.float().log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]
        found.append(float((torch.tensor(episode.logprobs) - expected).abs().max()))
    return max(found)


@torch.no_grad()
def learn_and_sync(engine: VllmEngine, lm: torch.nn.Module, version: int) -> None:
    """In buckets that cut layers and experts apart."""
    tensors = models.saved_tensors(lm)
    for tensor in tensors.values():
        if isinstance(tensor, torch.nn.Parameter):
            tensor.add_(torch.randn_like(tensor) * 0.05)
    known = [weights.Parameter(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()]
    for bucket in weights.plan(known, 20_000):
        engine.load([(parameter.name, tensors[parameter.name].detach().clone()) for parameter in bucket])
    engine.loaded(version)


@pytest.mark.parametrize("kind", [*IN_VLLM[:QUICK], *(pytest.param(kind, marks=pytest.mark.slow) for kind in IN_VLLM[QUICK:])])
def test_log_probabilities_are_the_models_own_before_and_after_weight_syncs(tmp_path, monkeypatch, kind):
    if kind == "cohere2":  # vLLM's windows of it are a token longer than those of transformers
        monkeypatch.setitem(FAMILIES, kind, {**FAMILIES[kind], "sliding_window": 64})
    path = exported(kind, tmp_path / "model")
    lm = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    engine = started(path)
    found = [difference(engine, lm)]
    for version in (1, 2):
        learn_and_sync(engine, lm, version)
        found.append(difference(engine, lm))
    assert max(found) < 1e-4, found


def test_a_family_whose_weights_vllm_leaves_as_they_were_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^rollout\.engine=vllm: gemma3n_text: vLLM takes no altup\.correct_output"):
        started(exported("gemma3n_text", tmp_path / "model"))
