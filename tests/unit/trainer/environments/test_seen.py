"""Pictures shown after any turn: engine, ranks and transformers by itself read the same, and nobody learns to write them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.playing import episodes_of, played, shown
from support.seeing import loaded, plain, said, seen
from support.sighted_rows import QUICK

from trainer.chat.processor import image_id, processor_of
from trainer.configs.ppo import PpoConfig
from trainer.episodes import Episode, Prompt
from trainer.online.roles import Rollout
from trainer.rollout.hf import HfEngine

every_family = pytest.mark.parametrize("kind", QUICK)


def engine_of(folder: Path) -> HfEngine:
    settings = {
        "model": {"path": str(folder), "dtype": "float32"},
        "data": {"path": "a:b"},
        "reward": {"function": "exact"},
        "rollout": {"engine": "hf", "max_new_tokens": 4},
        "placement": {"gpus_per_rank": 0, "gpus_per_engine": 0, "threads": 1},
    }
    return HfEngine(PpoConfig.model_validate(settings), str(folder), 0)


def prompts(engine: HfEngine) -> list[Prompt]:
    """With a picture, and without one."""
    processor = processor_of(engine.tokenizer)
    assert processor
    texts = [(processor.expanded(f"{processor.mark}count=", [seen(1)]), (seen(1),)), ("more=", ())]
    return [Prompt(i, engine.tokenizer(text)["input_ids"], {"number": i}, shown) for i, (text, shown) in enumerate(texts)]  # type: ignore[arg-type]


@every_family
def test_what_was_seen_after_any_turn_is_what_transformers_alone_would_see(sighted_folder):
    engine = engine_of(sighted_folder)
    episodes = episodes_of(played(engine, shown, prompts(engine)))
    assert [len(each.pictures) for each in episodes] == [4, 3]
    rollout = Rollout.of(episodes)
    learned = rollout.flat.mask_N.bool()
    expected = plain(sighted_folder, rollout.sequences)[learned]
    assert rollout.flat.rollout_N[learned].tolist() == pytest.approx(expected.tolist(), abs=1e-4)
    policy, sight, tokenizer = loaded(sighted_folder)
    for cut in ({"budget": 2000, "one_row": True}, {"budget": 2000, "alone": True}):
        assert said(policy, sight, rollout.sequences, cut)[learned].tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    first, second = rollout.sequences
    others = replace(first, pictures=tuple(seen(90 + i, one.size) for i, one in enumerate(first.pictures)))
    cut, at = {"budget": 2000, "one_row": True}, len(first.response_ids)
    before, after = (said(policy, sight, [each, second], cut) for each in (first, others))
    assert torch.equal(before[at:], after[at:]) and not torch.equal(before[:at], after[:at]), "a neighbour's pictures change no bit"
    processor = processor_of(tokenizer)
    assert processor
    for episode in episodes:
        [of_processor] = processor.own(
            text=[tokenizer.decode(collapsed(processor, episode))], images=[[one.image() for one in episode.pictures]]
        )["input_ids"]
        assert list(of_processor) == [*episode.prompt.token_ids, *episode.response_ids], "ids are the processor's"
    image = image_id(policy.lm.config)
    for episode in episodes:
        observed = [bool(m) for i, m in zip(episode.response_ids, episode.mask, strict=True) if i == image]
        assert observed and not any(observed), "pictures are not learned"


def collapsed(processor: Any, episode: Episode) -> list[int]:
    return processor.collapsed([*episode.prompt.token_ids, *episode.response_ids], episode.pictures)
