"""The value model's objective: PPO's clipped squared error (https://arxiv.org/abs/1707.06347, equation 9; clipped as in its code,
https://github.com/openai/baselines/blob/master/baselines/ppo2/model.py)."""

from __future__ import annotations

import torch

from trainer.episodes import Batch
from trainer.objectives import Stats
from trainer.objectives.aggregation import mean


def value(clip: float | None, batch: Batch, output: tuple[torch.Tensor]) -> tuple[torch.Tensor, Stats]:
    """`output` are the values [N]. `tokens_N` has mask, values (those before the first update on the batch) and returns."""
    t, (values_N,) = batch.tokens_N, output
    return mean(value_loss(values_N, t["values"], t["returns"], clip), batch), {}


def value_loss(values_N: torch.Tensor, old_values_N: torch.Tensor, returns_N: torch.Tensor, clip: float | None) -> torch.Tensor:
    """Half the squared error per token [N]; with `clip` the worse of the value and of the value kept within +-clip of the old one."""
    loss_N = (values_N - returns_N).square()
    if clip is not None:
        near_N = old_values_N + (values_N - old_values_N).clamp(-clip, clip)
        loss_N = torch.maximum(loss_N, (near_N - returns_N).square())
    return loss_N / 2
