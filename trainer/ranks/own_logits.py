"""Whether log-probabilities are those of a model's own logits: asked of the model itself, as it is loaded.

The trainer applies a model's head to some tokens at a time, and after it what heads.AFTER_HEAD lists. Some families do more, before the
head (MiniCPM 3 divides) or after it. Runs in ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trainer.data.packing import Sequence, pack
from trainer.episodes import Batch
from trainer.models.heads import PolicyModel

TOKENS = 6
# Of a log-probability: kernels round otherwise where they compute with other shapes. What is forgotten is far more.
MOST = {torch.float32: 1e-3}  # and of other types:
MOST_ROUNDED = 0.2


@torch.no_grad()
def difference(compute: Callable[[Batch], Any], policy: PolicyModel, device: torch.device) -> float:
    """The largest, of `policy`, which `compute` runs, beyond what may be rounding; else 0. Collective under ZeRO-3; two passes."""
    vocabulary = policy.lm.config.get_text_config().vocab_size
    ids = [(1 + 5 * i) % vocabulary for i in range(TOKENS)]
    [batch] = pack([Sequence(ids[:1], ids[1:])], TOKENS, pad_id=0)
    batch = batch.to(device)
    ours = compute(batch)[0]
    with policy.by_itself():
        own = compute(batch)[0]
    found = float((ours - own).abs().max())
    return found if not found <= MOST.get(next(policy.lm.parameters()).dtype, MOST_ROUNDED) else 0.0
