"""Experts that tokens took in the engine on transformers, with their answers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.families import exported

from trainer.configs.ppo import PpoConfig
from trainer.data.experts import experts_of
from trainer.episodes import Episode, Prompt
from trainer.errors import ConfigError
from trainer.rollout import Sampling, sample
from trainer.rollout.hf import HfEngine

PROMPTS = [Prompt(0, [3, 4, 5], {}), Prompt(1, [13, 6, 6, 7, 8, 9, 14], {}), Prompt(2, [10], {})]


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported("mixtral", tmp_path_factory.mktemp("mixtral") / "model")


def engine(path: Path, setting: str = "required") -> HfEngine:
    config = PpoConfig.model_validate(
        {
            "model": {"path": str(path), "dtype": "float32", "attention": "eager"},
            "data": {"path": "a:b", "max_prompt_tokens": 16},
            "rollout": {"engine": "hf", "max_new_tokens": 12, "max_sequences": 64, "router_replay": setting},
            "placement": {"gpus_per_rank": 0},
        }
    )
    return HfEngine(config, str(path), 0)


def chosen(of: HfEngine, ids: list[int]) -> np.ndarray:
    """By the model for the whole text at once."""
    assert of.routers is not None
    with torch.inference_mode(), of.routers.taken() as taken:
        of.lm(input_ids=torch.tensor([ids]), use_cache=False)
        return taken().numpy()


def same(found: np.ndarray | None, expected: np.ndarray) -> bool:
    return found is not None and found.shape == expected.shape and bool((np.sort(found, -1) == np.sort(expected, -1)).all())


def sampled(of: HfEngine, **how: Any) -> list[Episode]:
    return asyncio.run(sample(of, PROMPTS, [0, 1, 2], Sampling(12, samples=8, **how), 3))


def test_each_token_has_those_that_its_router_chose_though_prompts_are_padded_and_rows_leave(mixtral):
    built = engine(mixtral)
    assert built.unrecorded() == ""
    episodes = sampled(built, experts=0)
    assert len({len(e.response_ids) for e in episodes}) > 3, "rows leave the batch"
    for episode in episodes:
        assert same(experts_of(episode), chosen(built, [*episode.prompt.token_ids, *episode.response_ids[:-1]]))


def test_what_is_known_of_a_prompt_is_left_out_and_who_does_not_ask_gets_none(mixtral):
    built = engine(mixtral)

    async def ask() -> list[Any]:
        how: list[dict[str, Any]] = [{"experts": 5}, {}, {"experts": 0}]
        return await asyncio.gather(*(built.generate(PROMPTS[1].token_ids, Sampling(6, samples=2, **each)) for each in how))

    some, none, whole = asyncio.run(ask())
    for turn in some:
        assert same(turn.experts, chosen(built, [*PROMPTS[1].token_ids, *turn.token_ids[:-1]])[5:])
    assert [turn.experts for turn in none] == [None, None]
    assert [len(turn.experts) for turn in whole] == [7 + len(turn.token_ids) - 1 for turn in whole]
    assert all(turn.experts is None for episode in sampled(built) for turn in episode.turns)


def test_tokens_that_were_read_with_older_weights_keep_what_these_chose(mixtral):
    built = engine(mixtral)
    built.ask(0, PROMPTS[1].token_ids, Sampling(12, samples=8, experts=0))
    for _ in range(4):
        built._step()
    before = chosen(built, PROMPTS[1].token_ids)
    with torch.no_grad():
        for tensor in built.tensors.values():
            tensor.add_(torch.randn_like(tensor) * 0.1)
    built.loaded(1)
    (turns,) = built.work(60).values()
    assert any(turn.switches for turn in turns)
    for turn in turns:
        assert turn.experts is not None and len(turn.experts) == 7 + len(turn.token_ids) - 1 and same(turn.experts[:7], before)
    assert not same(chosen(built, PROMPTS[1].token_ids), before), "others by now"


def test_off_records_nothing_and_a_dense_model_is_refused_where_experts_are_required(mixtral, tiny_model):
    off = engine(mixtral, "off")
    assert off.unrecorded() == "rollout.router_replay=off"
    assert all(turn.experts is None for episode in sampled(off, experts=0) for turn in episode.turns)
    assert engine(tiny_model, "auto").unrecorded() == "qwen2 has no experts"
    with pytest.raises(ConfigError, match=r"^rollout\.router_replay=required: qwen2 has no experts; use off$"):
        engine(tiny_model)
