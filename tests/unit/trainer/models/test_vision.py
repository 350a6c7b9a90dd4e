"""Families of models that see: what engine and ranks feed them is what transformers would, packed or not, and a neighbour is not seen."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from support.seeing import loaded, plain, said, seen
from support.sighted_rows import QUICK, RECURRENT, SIGHTED

from trainer import models
from trainer.chat.processor import processor_of
from trainer.configs.ppo import PpoConfig
from trainer.configs.sections import ModelConfig
from trainer.data.packing import Sequence, pack
from trainer.episodes import Batch, Prompt
from trainer.models import vision
from trainer.models.heads import PolicyModel
from trainer.rollout import Sampling, sample
from trainer.rollout.hf import HfEngine


def of(kinds: Iterable[str]) -> Any:
    return pytest.mark.parametrize("kind", [pytest.param(kind, marks=[] if kind in QUICK else [pytest.mark.slow]) for kind in kinds])


every_family, packed_ones = of(SIGHTED), of(kind for kind in SIGHTED if kind not in RECURRENT)
CUTS: list[dict[str, Any]] = [{"budget": 2000, "one_row": True}, {"budget": 2000}, {"budget": 2000, "alone": True}, {"budget": 200}]


def prompts(tokenizer: Any) -> list[Prompt]:
    """Of no picture, one and two, of several sizes."""
    processor = processor_of(tokenizer)
    assert processor
    shown = [(seen(1),), (seen(2, (64, 32)), seen(3)), (), (seen(1),), (seen(4, (32, 64)),)]
    texts = [processor.expanded(f"{processor.mark}count=", shown[0]), processor.expanded(f"b{processor.mark}{processor.mark}\n=", shown[1])]
    texts += ["more", *(processor.expanded(f"\n{processor.mark}\nlo", each) for each in shown[3:])]
    return [Prompt(i, tokenizer(text)["input_ids"], {}, each) for i, (text, each) in enumerate(zip(texts, shown, strict=True))]


@every_family
def test_a_prompt_has_the_tokens_that_the_processor_gives_it(sighted_folder):
    tokenizer = models.load_tokenizer(ModelConfig(path=str(sighted_folder), vision="on"))
    processor = processor_of(tokenizer)
    assert processor
    shown = [seen(1, (64, 32)), seen(2)]
    text = f"b\n{processor.mark}\ncount={processor.mark}="
    own = processor.own(text=[text], images=[[each.image() for each in shown]], return_tensors="pt")["input_ids"][0]
    assert tokenizer(processor.expanded(text, shown))["input_ids"] == own.tolist()


@every_family
def test_packed_or_not_log_probabilities_are_those_of_transformers_alone(sighted_folder, kind):
    policy, sight, tokenizer = loaded(sighted_folder)
    sequences = [Sequence(each.token_ids, [5, 9, 4, 7], pictures=each.pictures) for each in prompts(tokenizer)]
    expected = plain(sighted_folder, sequences)
    cuts = [cut for cut in CUTS if kind not in RECURRENT or cut.get("alone")]
    for cut in cuts:
        assert said(policy, sight, sequences, cut).tolist() == pytest.approx(expected.tolist(), abs=1e-5), cut
    others = [
        Sequence(each.prompt_ids, each.response_ids, pictures=tuple(seen(9, one.size) for one in each.pictures)) for each in sequences
    ]
    moved = (said(policy, sight, others, cuts[0]) - expected).abs()
    assert moved.max() > 1e-3, "pictures count"
    assert moved[8:12].max() < 1e-5, "but for the text that has none"


@every_family
def test_another_picture_beside_a_sequence_changes_none_of_its_bits(sighted_folder, kind):
    policy, sight, tokenizer = loaded(sighted_folder)
    first, *rest = [Sequence(each.token_ids, [5, 9, 4, 7], pictures=each.pictures) for each in prompts(tokenizer)]
    cut = CUTS[2 if kind in RECURRENT else 0]
    before = said(policy, sight, [first, *rest], cut)
    after = said(policy, sight, [Sequence(first.prompt_ids, first.response_ids, pictures=(seen(8),)), *rest], cut)
    assert torch.equal(before[4:], after[4:]) and not torch.equal(before[:4], after[:4])


@packed_ones
def test_the_engine_samples_from_what_the_policy_says(sighted_folder):
    settings = {
        "model": {"path": str(sighted_folder), "dtype": "float32"},
        "data": {"path": "a:b"},
        "reward": {"function": "exact"},
        "rollout": {"engine": "hf", "max_new_tokens": 6},
        "placement": {"gpus_per_rank": 0, "gpus_per_engine": 0, "threads": 1},
    }
    engine = HfEngine(PpoConfig.model_validate(settings), str(sighted_folder), 0)
    policy, sight, tokenizer = loaded(sighted_folder)
    asked = prompts(tokenizer)
    episodes = asyncio.run(sample(engine, asked, [*range(len(asked))], Sampling(6, samples=3), 0))
    sequences = [Sequence(each.prompt.token_ids, each.response_ids, pictures=each.prompt.pictures) for each in episodes]
    rollout = [value for each in episodes for value in each.logprobs]
    assert said(policy, sight, sequences, CUTS[1]).tolist() == pytest.approx(rollout, abs=1e-4)
    assert not {i for each in episodes for i in each.response_ids} & set(vision.unsampled(policy.lm))
    assert engine.sight and engine.sight.processor.looked <= 5, "each picture is looked at once, whatever the samples"


@packed_ones
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-6)])  # norms of models are float32 in both
def test_loss_and_gradients_are_those_of_sequences_one_at_a_time_in_the_tower_too(sighted_folder, dtype, bound):
    found = []
    for one_at_a_time in (False, True):
        policy, sight, tokenizer = loaded(sighted_folder)
        policy.to(dtype)
        policy.lm.set_experts_implementation("eager")  # torch has no grouped product of float64
        sequences = [Sequence(each.token_ids, [5, 9, 4, 7], pictures=each.pictures) for each in prompts(tokenizer)]
        batches = [
            batch for some in ([[one] for one in sequences] if one_at_a_time else [sequences]) for batch in pack(some, 2000, pad_id=0)
        ]
        assert len(batches) == (len(sequences) if one_at_a_time else 1)
        found.append((learned(policy, sight, batches), {name: p.grad for name, p in policy.lm.named_parameters() if p.grad is not None}))
    (loss, packed), (loss_alone, alone) = found
    assert loss == pytest.approx(loss_alone, rel=bound)
    towers = {name for name in alone if "vis" in name}
    assert sum(float(alone[name].abs().max()) > 0 for name in towers) > len(towers) / 2
    for part in (towers, alone.keys() - towers):
        differences = torch.cat([(packed[name] - alone[name]).flatten() for name in part])
        assert differences.norm() <= bound * torch.cat([alone[name].flatten() for name in part]).norm()


def learned(policy: PolicyModel, sight: vision.Sight, batches: list[Batch]) -> float:
    """The loss of these; their gradients are the model's."""
    total = 0.0
    for batch in batches:
        sight.look(batch)
        batch.inputs = {name: t.to(next(policy.parameters()).dtype) if t.is_floating_point() else t for name, t in batch.inputs.items()}
        loss = policy(batch)[0].sum()
        loss.backward()
        total += loss.item()
    return total
