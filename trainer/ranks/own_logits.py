"""Whether log-probabilities are those of a model's own logits: asked of the model itself, as it is loaded.

The trainer applies a model's head to some tokens at a time, and after it what heads.AFTER_HEAD lists; it lays several sequences beside each
other, and padding behind some. Some families do more before the head (MiniCPM 3 divides) or after it, look at tokens that follow (BERT's
kind, transformers' MiniMax), or draw random experts while they learn (Phi-3.5-MoE). Runs in ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trainer.data.packing import Sequence, pack
from trainer.episodes import Batch
from trainer.models.heads import PolicyModel

LENGTHS = 23, 14  # tokens
LATER = 3  # of them, of which those before must know nothing
# Of a log-probability: kernels round otherwise where they compute with other shapes. What is forgotten is far more.
MOST = {torch.float32: 1e-3}  # and of other types:
MOST_ROUNDED = 0.2


@torch.no_grad()
def difference(compute: Callable[[Batch], Any], policy: PolicyModel, device: torch.device, *, alone: bool) -> float:
    """The largest, of `policy`, which `compute` runs, beyond what may be rounding; else 0. Collective under ZeRO-3; three passes.

    Of two sequences in one micro-batch, each in a row of its own if `alone`, against those that the model says of each by itself, without
    its last tokens.
    """
    settings = policy.lm.config.get_text_config()
    room = max(getattr(settings, "max_position_embeddings", None) or LENGTHS[0], LATER + 2)
    texts = [[(start + 5 * i) % settings.vocab_size for i in range(min(length, room))] for start, length in enumerate(LENGTHS, 1)]
    ours_N = _of(compute, [Sequence(ids[:1], ids[1:]) for ids in texts], device, alone=alone)
    found, at = 0.0, 0
    with policy.by_itself():
        for ids in texts:
            own_n = _of(compute, [Sequence(ids[:1], ids[1:-LATER])], device, alone=False)
            found = max(found, float((ours_N[at : at + len(own_n)] - own_n).abs().max()))
            at += len(ids) - 1
    return found if not found <= MOST.get(next(policy.lm.parameters()).dtype, MOST_ROUNDED) else 0.0


def _of(compute: Callable[[Batch], Any], sequences: list[Sequence], device: torch.device, *, alone: bool) -> torch.Tensor:
    lengths = [1 + len(each.response_ids) for each in sequences]
    budget = max(lengths) * len(lengths) if alone else sum(lengths)
    [batch] = pack(sequences, budget, pad_id=0, one_row=not alone, alone=alone)
    out_N = compute(batch.to(device))[0]
    return out_N.new_zeros(len(out_N)).index_copy(0, batch.flat_N.to(device), out_N)  # in the order of `sequences`
