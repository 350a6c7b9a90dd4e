"""Models that see in vLLM: its log-probabilities are the model's own, as loaded and after a weight sync that changes the tower."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from support.playing import episodes_of, played, shown
from support.seeing import loaded, said
from support.sighted import sighted
from support.sighted_table import IN_VLLM

pytest.importorskip("vllm", reason="vLLM is not installed (make install)")

from trainer import models, weights
from trainer.chat.pictures import Limits, picture
from trainer.chat.processor import processor_of
from trainer.configs.ppo import PpoConfig
from trainer.configs.sections import ModelConfig
from trainer.data.packing import Sequence, pack
from trainer.data.shapes import drawn
from trainer.episodes import Prompt
from trainer.errors import ConfigError
from trainer.models import vision
from trainer.models.heads import PolicyModel
from trainer.online.roles import Rollout
from trainer.rollout import Sampling, sample
from trainer.rollout.vllm import SIGHTED, VllmEngine


def started(path: Path, max_images: int = 2) -> VllmEngine:
    settings: dict[str, Any] = {
        "model": {"path": str(path), "dtype": "float32"},
        "data": {"path": "a:b", "max_prompt_tokens": 64 if max_images == 2 else 200, "max_images": max_images},
        "reward": {"function": "exact"},
        "rollout": {"engine": "vllm", "max_new_tokens": 12, "max_sequences": 16},
        "placement": {"gpus_per_rank": 0, "processes": "one"},
    }
    return VllmEngine(PpoConfig.model_validate(settings), str(path), 0)


@torch.no_grad()
def difference(engine: VllmEngine, policy: PolicyModel, sight: vision.Sight, prompts: list[Prompt]) -> float:
    episodes = asyncio.run(sample(engine, prompts, [*range(len(prompts))], Sampling(12, 1.0, samples=3), 3))
    [batch] = pack([Sequence(e.prompt.token_ids, e.response_ids, pictures=e.prompt.pictures) for e in episodes], 4000, pad_id=0)
    sight.look(batch)
    out_N = torch.zeros(len(batch.flat_N)).index_copy(0, batch.flat_N, policy(batch)[0])
    never = set(vision.unsampled(policy.lm))
    assert not never & {i for each in episodes for i in each.response_ids}
    return float((out_N - torch.tensor([value for each in episodes for value in each.logprobs])).abs().max())


QUICK = ("qwen2_5_vl", "qwen3_vl")


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[] if kind in QUICK else [pytest.mark.slow]) for kind in SIGHTED])
def test_vllm_samples_from_what_the_policy_says(tmp_path, kind):
    path = sighted(kind, tmp_path / "model")
    config = ModelConfig(path=str(path), dtype="float32", attention="sdpa")
    tokenizer = models.load_tokenizer(config)
    lm, processor = models.load_lm(config, 0, torch.device("cpu")), processor_of(tokenizer)
    sight = models.sight(lm, tokenizer)
    assert processor and sight
    prompts = []
    for i, sizes in enumerate([[(48, 48)], [(64, 32), (32, 32)], []]):
        rng = random.Random(i)
        shown = tuple(picture(drawn(rng.choices("rgb", k=3), rng).resize(size), str(size), Limits()) for size in sizes)
        ids: Any = tokenizer(processor.expanded("b" + processor.mark * len(shown) + "count=", shown))["input_ids"]
        prompts.append(Prompt(i, ids, {}, shown))
    engine = started(path)
    policy = PolicyModel(lm)
    assert difference(engine, policy, sight, prompts) < 1e-4
    tensors = models.saved_tensors(lm)
    with torch.no_grad():
        for tensor in tensors.values():
            if isinstance(tensor, torch.nn.Parameter):
                tensor.add_(torch.randn_like(tensor) * 0.05)
    known = [weights.Parameter(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()]
    for bucket in weights.plan(known, 20_000):
        engine.load([(parameter.name, tensors[parameter.name].detach().clone()) for parameter in bucket])
    engine.loaded(1)
    assert difference(engine, policy, sight, prompts) < 1e-4, "after a sync, of the same pictures"


def test_the_page_of_models_says_which_these_are():
    assert IN_VLLM == SIGHTED


def test_a_family_that_vllm_computes_otherwise_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="gemma3: of models that see vLLM computes qwen2_vl"):
        started(sighted("gemma3", tmp_path / "model"))


def test_a_qwen3_vl_whose_configuration_leaves_out_where_pictures_are_is_refused(tmp_path):
    path = sighted("qwen3_vl", tmp_path / "model")
    written = json.loads((path / "config.json").read_text())
    del written["text_config"]["rope_parameters"]["mrope_interleaved"]
    (path / "config.json").write_text(json.dumps(written))
    with pytest.raises(ConfigError, match=r"config\.json has no rope_parameters\.mrope_interleaved=true in text_config"):
        started(path)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", *(pytest.param(kind, marks=pytest.mark.slow) for kind in SIGHTED if kind != "qwen2_5_vl")])
def test_pictures_after_any_turn_are_read_as_the_policy_reads_them(tmp_path, kind):
    """What vLLM expands in the midst of a conversation has the tokens, positions and log-probabilities of the ranks."""
    path = sighted(kind, tmp_path / "model")
    engine = started(path, max_images=4)
    asked = [Prompt(i, engine.tokenizer("more=")["input_ids"], {"number": i}) for i in range(3)]  # type: ignore[arg-type]
    episodes = episodes_of(played(engine, shown, asked))
    assert [len(each.pictures) for each in episodes] == [3] * 3
    rollout = Rollout.of(episodes)
    policy, sight, _ = loaded(path)
    learned = rollout.flat.mask_N.bool()
    out_N = said(policy, sight, rollout.sequences, {"budget": 4000, "one_row": True})
    assert out_N[learned].tolist() == pytest.approx(rollout.flat.rollout_N[learned].tolist(), abs=1e-4)
