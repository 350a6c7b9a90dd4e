"""What a rank learns: objective(micro-batch, what its model makes of it) -> (loss, statistics).

The loss is the micro-batch's share of the global mean (`aggregation.py`); statistics are sums over its tokens, which the driver adds up
over micro-batches and ranks and divides by the tokens of the global batch. What the driver knows per token lies in `batch.tokens_N`, what
it knows per step in `batch.numbers`. A new objective is a function in a file of its own here, and a config of its entry point.
Beside them: what the driver makes of rewards before that, advantages and the penalty for distance from the reference. Pure functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trainer.episodes import Batch

Stats = dict[str, torch.Tensor]
Objective = Callable[[Batch, Any], tuple[torch.Tensor, Stats]]
