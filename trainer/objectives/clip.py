"""PPO's clipped loss (https://arxiv.org/abs/1707.06347, equation 7), with a second bound where the advantage is negative."""

from __future__ import annotations

import torch

from trainer.configs.algorithm import AlgorithmConfig
from trainer.episodes import Batch


def clip(algorithm: AlgorithmConfig, logp_N: torch.Tensor, log_ratio_N: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """`dual_clip` c > 1 bounds the loss of tokens with a negative advantage by -c*A (https://arxiv.org/abs/1912.09729, equation 5)."""
    advantages_N = batch.tokens_N["advantages"]
    loss_N, clipped_N = clipped(log_ratio_N.exp(), advantages_N, algorithm.clip_low, algorithm.clip_high)
    if algorithm.dual_clip is not None:
        bound_N = -advantages_N * algorithm.dual_clip
        over_N = (advantages_N < 0) & (loss_N > bound_N)
        loss_N = torch.where(over_N, bound_N, loss_N)
        clipped_N = clipped_N | over_N
    return loss_N, clipped_N


def clipped(ratio_N: torch.Tensor, advantages_N: torch.Tensor, low: float, high: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The worse of the loss with the ratio and with the ratio within 1-low and 1+high [N]; and where it was the second [N]."""
    free_N = -advantages_N * ratio_N
    loss_N = torch.maximum(free_N, -advantages_N * ratio_N.clamp(1 - low, 1 + high))
    return loss_N, loss_N > free_N
