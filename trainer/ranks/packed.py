"""Whether sequences that share a row of a micro-batch see each other in a model: asked of the model itself, as it is loaded.

Some families make their masks without position ids (GPT-OSS, Falcon, Bloom), and recurrent layers carry a state over the borders (Mamba,
Qwen3-Next, Granite 4): `transformers.masking_utils` does nothing about either, and nothing warns. Runs in ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trainer.data.packing import Sequence, pack
from trainer.episodes import Batch
from trainer.models.heads import backbone

BEFORE, AFTER = 9, 7  # tokens of the two sequences
# A mixture of experts multiplies other numbers of tokens at a time where the first sequence is another, which rounds the second otherwise.
TIMES = 8.0
LEAST = {torch.float32: 1e-5}  # of the largest hidden state, and of other types:
LEAST_ROUNDED = 1e-3


SAYS = "packed sequences would see each other in this model: each gets a row of its own, padded to the longest beside it"


@torch.no_grad()
def seen(compute: Callable[[Batch], Any], lm: Any, device: torch.device) -> bool:
    """Whether the second sequence of a row changes with the first, in `lm`, which `compute` runs. Collective under ZeRO-3; four passes."""
    hidden: list[torch.Tensor] = []
    hook = backbone(lm).register_forward_hook(lambda _, __, output: hidden.append(output.last_hidden_state.float()))

    def change(alone: bool) -> float:
        """Of the second sequence's hidden states where the first is another, relative to the largest."""
        vocabulary = lm.config.get_text_config().vocab_size
        second = [(1 + 5 * i) % vocabulary for i in range(AFTER)]
        for start in (3, 4):
            first = [(start + 5 * i) % vocabulary for i in range(BEFORE)]
            budget = 2 * BEFORE if alone else BEFORE + AFTER
            [batch] = pack([Sequence(ids, ids[:1]) for ids in (first, second)], budget, pad_id=0, one_row=not alone, alone=alone)
            compute(batch.to(device))
        before, after = (one[1, :AFTER] if alone else one[0, BEFORE:] for one in hidden[-2:])
        return float((before - after).abs().max() / before.abs().max().clamp(min=1e-30))

    try:
        return change(alone=False) > TIMES * change(alone=True) + LEAST.get(next(lm.parameters()).dtype, LEAST_ROUNDED)
    finally:
        hook.remove()
