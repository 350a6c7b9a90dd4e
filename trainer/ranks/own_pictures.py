"""Whether a model that sees is computed right: asked of the model itself, on pictures that are made for it, as it is loaded.

The trainer lays several sequences with pictures beside each other, and gives their pixels to the tower once. A family may do more with its
processor's tensors than is known here, or let pictures of one sequence be seen by its neighbour. Runs in ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trainer.data.packing import Sequence, pack
from trainer.episodes import Batch
from trainer.models.heads import PolicyModel
from trainer.models.vision import Sight, unsampled
from trainer.ranks.own_logits import MOST, MOST_ROUNDED

ANSWER = 6  # tokens after each


@torch.no_grad()
def difference(
    compute: Callable[[Batch], Any], policy: PolicyModel, sight: Sight, device: torch.device, *, alone: bool, several: bool = True
) -> float:
    """The largest, of log-probabilities of `policy`, which `compute` runs, beyond what may be rounding; else 0. Collective under ZeRO-3.

    Of two sequences with pictures and a text, in one micro-batch, each in a row of its own if `alone`; against those that the model
    says of each by itself, of its processor's own tensors. The second has two pictures if prompts may have `several`.
    Raises Unreadable for a processor that makes something else of several than of each.
    """
    vocabulary = policy.lm.config.get_text_config().vocab_size
    never = {*unsampled(policy.lm), sight.image}
    answer = [i for i in range(1, vocabulary) if i not in never][:ANSWER]
    shown = sight.processor.examples(several=several)
    told = [fed for _, fed in shown]
    sequences = [Sequence(fed["input_ids"][0].tolist(), answer, pictures=pictures) for pictures, fed in shown]
    sequences.insert(1, Sequence(answer[:1], answer))
    ours = _of(compute, sequences, sight, device, alone=alone)
    found = 0.0
    for fed, sequence, ours_n in zip([told[0], None, told[1]], sequences, ours, strict=True):
        with policy.by_itself(**_longer(fed, len(answer) - 1, device)):
            [own_n] = _of(compute, [sequence], sight, device, alone=False)
        found = max(found, float((ours_n - own_n).abs().max()))
    return found if not found <= MOST.get(next(policy.lm.parameters()).dtype, MOST_ROUNDED) else 0.0


def _longer(fed: dict[str, Any] | None, tokens: int, device: torch.device) -> dict[str, Any]:
    """A processor's tensors beside the ids, for a prompt that so many tokens of an answer follow; the last is never fed."""
    if fed is None:
        return {}
    width = fed["input_ids"].size(1)
    of_tokens = {
        name: torch.cat([tensor, tensor.new_zeros(1, tokens)], 1)
        for name, tensor in fed.items()
        if name != "input_ids" and tensor.shape == (1, width)
    }
    return {name: tensor.to(device) for name, tensor in (fed | of_tokens).items() if name != "input_ids"}


def _of(
    compute: Callable[[Batch], Any], sequences: list[Sequence], sight: Sight, device: torch.device, *, alone: bool
) -> tuple[torch.Tensor, ...]:
    """Log-probabilities of each sequence's answer."""
    lengths = [len(each.prompt_ids) + len(each.response_ids) for each in sequences]
    budget = max(lengths) * len(lengths) if alone else sum(lengths)
    [batch] = pack(sequences, budget, pad_id=0, one_row=not alone, alone=alone)
    sight.look(batch)
    out_N = compute(batch.to(device))[0]
    flat_N = out_N.new_zeros(len(out_N)).index_copy(0, batch.flat_N.to(device), out_N)
    return flat_N.split([len(each.response_ids) for each in sequences])
