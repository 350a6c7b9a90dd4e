"""Experts that vLLM's routers chose: with the answers, over turns, prompts that it has read before, and weights that change meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.families import exported
from transformers import AutoModelForCausalLM

pytest.importorskip("vllm", reason="vLLM is not installed (make install)")

from trainer import models
from trainer.configs.ppo import PpoConfig
from trainer.data.experts import experts_of
from trainer.episodes import Episode, Prompt, Turn
from trainer.errors import ConfigError
from trainer.models import routers
from trainer.rollout import Sampling, sample
from trainer.rollout.routed import Experts
from trainer.rollout.vllm import VllmEngine

LONG = [3 + i % 12 for i in range(70)]  # more than one of vLLM's blocks, which alone are found again
PROMPTS = [Prompt(0, [3, 4, 5], {}), Prompt(1, LONG, {}), Prompt(2, [10], {})]
IDS = torch.arange(13)[None]


def started(path: Path, **rollout: Any) -> VllmEngine:
    rollout = {"engine": "vllm", "max_new_tokens": 12, "max_sequences": 64, "router_replay": "required", **rollout}
    config = PpoConfig.model_validate(
        {
            "model": {"path": str(path), "dtype": "float32", "attention": "eager"},
            "data": {"path": "a:b", "max_prompt_tokens": 100},
            "rollout": rollout,
            "placement": {"gpus_per_rank": 0, "processes": "one"},
        }
    )
    return VllmEngine(config, str(path), 0)


class Model:
    """As transformers has it, whose routers choose alike."""

    def __init__(self, path: Path):
        self.lm = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
        self.routers = routers.attach(self.lm, lambda: self.lm(input_ids=IDS, use_cache=False), IDS.numel())

    def chosen(self, ids: list[int]) -> np.ndarray:
        with torch.no_grad(), self.routers.taken() as taken:
            self.lm(input_ids=torch.tensor([ids]), use_cache=False)
            return taken().numpy()

    def agrees(self, episode: Episode) -> bool:
        found = experts_of(episode)
        assert found is not None
        expected = self.chosen([*episode.prompt.token_ids, *episode.response_ids[:-1]])
        assert found.shape == expected.shape and found.dtype == expected.dtype
        return bool((np.sort(found, -1) == np.sort(expected, -1)).all())

    def difference(self, episode: Episode, *, replay: bool) -> float:
        """The largest from the engine's log-probabilities."""
        prompt, answer, found = episode.prompt.token_ids, torch.tensor(episode.response_ids), experts_of(episode)
        assert found is not None
        self.routers.replay(torch.from_numpy(found) if replay else None)
        with torch.no_grad():
            logits = self.lm(input_ids=torch.tensor([[*prompt, *answer[:-1]]]), use_cache=False).logits[0, len(prompt) - 1 :]
        return float((logits.log_softmax(-1).gather(1, answer[:, None])[:, 0] - torch.tensor(episode.logprobs)).abs().max())


def test_each_token_has_the_experts_that_its_router_chose(tmp_path):
    path = exported("qwen3_moe", tmp_path / "model")
    engine, model = started(path), Model(path)
    assert engine.unrecorded() == ""
    sampling = Sampling(12, samples=4, experts=0)
    for _ in range(2):  # the second time the long prompt lies in the cache
        assert all(map(model.agrees, asyncio.run(sample(engine, PROMPTS, [0, 1, 2], sampling, 3))))
    again = asyncio.run(engine.generate(LONG, Sampling(12, experts=60)))[0]
    assert again.experts is not None and len(again.experts) == 70 - 60 + len(again.token_ids) - 1, "from that token on"
    assert asyncio.run(engine.generate(LONG, Sampling(12)))[0].experts is None, "not asked for"
    turns = [again, Turn([4, 4, 5])]
    turns.append(asyncio.run(engine.generate([*LONG, *again.token_ids, 4, 4, 5], Sampling(8, experts=70 + len(again.token_ids) - 1)))[0])
    whole = Episode(PROMPTS[1], 0, turns)
    found, expected = experts_of(whole), model.chosen([*LONG, *whole.response_ids[:-1]])
    assert found is not None and (found[:60] == 255).all() and (np.sort(found[60:], -1) == np.sort(expected[60:], -1)).all()
    with torch.no_grad():
        tensors = models.saved_tensors(model.lm)
        for tensor in tensors.values():
            tensor.add_(torch.randn_like(tensor) * 0.05)
    engine.ask(0, LONG, Sampling(12, samples=8, experts=0))
    for _ in range(3):
        engine._step()
    engine.load([(name, tensor.detach().clone()) for name, tensor in tensors.items()])
    engine.loaded(1)
    (mixed,) = engine.work(60).values()  # tokens that older weights read keep what these chose
    assert all(turn.experts is not None and len(turn.experts) == len(LONG) + len(turn.token_ids) - 1 for turn in mixed)
    assert any(turn.switches for turn in mixed) and not all(model.agrees(Episode(PROMPTS[1], 0, [turn])) for turn in mixed)
    assert all(map(model.agrees, asyncio.run(sample(engine, PROMPTS, [0, 1, 2], sampling, 3))))


FAMILIES = ["gpt_oss", "qwen2_moe", "olmoe", "granitemoe", "granitemoehybrid", "hunyuan_v1_moe"]


@pytest.mark.parametrize("kind", ["ernie4_5_moe", *(pytest.param(kind, marks=pytest.mark.slow) for kind in FAMILIES)])
def test_log_probabilities_of_a_model_that_takes_an_engines_experts_are_the_engines(tmp_path, kind):
    """Also of ERNIE, of which vLLM on CPUs chooses others than the model does."""
    path = exported(kind, tmp_path / "model")
    model = Model(path)
    episodes = asyncio.run(sample(started(path), PROMPTS, [0, 1, 2], Sampling(12, samples=4, experts=0), 3))
    replayed, plain = (max(model.difference(episode, replay=replay) for episode in episodes) for replay in (True, False))
    assert replayed < 1e-4 and (plain < 1e-4) == (kind != "ernie4_5_moe")


def test_windows_and_a_cache_that_is_too_small_for_all_leave_no_gap(tmp_path):
    path = exported("mixtral", tmp_path / "model")
    engine, model = started(path, options={"kv_cache_memory_bytes": 1 << 20, "max_num_batched_tokens": 64, "max_num_seqs": 16}), Model(path)
    assert all(map(model.agrees, asyncio.run(sample(engine, PROMPTS, [0, 1, 2], Sampling(12, samples=40, experts=0), 3))))


@pytest.mark.parametrize("setting", ["auto", "off"])
def test_where_experts_are_not_to_be_had_answers_come_without(tmp_path, setting):
    path = exported("qwen3" if setting == "auto" else "qwen3_moe", tmp_path / "model")
    experts = Experts(setting, str(path))
    assert experts.why == ("qwen3 has no experts" if setting == "auto" else "rollout.router_replay=off")


def test_a_model_without_experts_is_refused_where_they_are_required(tmp_path):
    path = exported("qwen3", tmp_path / "model")
    with pytest.raises(ConfigError, match=r"^rollout\.router_replay=required: qwen3 has no experts; use off$"):
        Experts("required", str(path))


def test_a_kernel_that_tells_nothing_of_its_router_is_said_to_be_off_by_a_setting(tmp_path):
    """As vLLM finds out on GPUs, once it has loaded the model."""
    experts = Experts("auto", str(exported("qwen3_moe", tmp_path / "model")))
    said = r"^rollout\.router_replay=auto: Routed-experts capture is not supported with router Own; use off$"
    with pytest.raises(ConfigError, match=said), experts.starting():
        raise ValueError("Routed-experts capture is not supported with router Own.")
    with pytest.raises(ValueError, match="other"), experts.starting():
        raise ValueError("other")
