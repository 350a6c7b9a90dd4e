"""CISPO: every token keeps its gradient, its importance weight is bounded (MiniMax-M1, https://arxiv.org/abs/2506.13585)."""

from __future__ import annotations

import torch

from trainer.configs.algorithm import AlgorithmConfig
from trainer.episodes import Batch


def cispo(algorithm: AlgorithmConfig, logp_N: torch.Tensor, log_ratio_N: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """-sg(min(ratio, 1 + clip_high)) * A * logp per token (equations 4 and 5), without a lower bound, as in the paper's experiments.

    No gradient is removed, so no token counts as clipped.
    """
    weight_N = log_ratio_N.detach().exp().clamp(max=1 + algorithm.clip_high)
    logp_N = torch.where(batch.tokens_N["mask"].bool(), logp_N, 0.0)
    return -weight_N * batch.tokens_N["advantages"] * logp_N, torch.zeros_like(weight_N, dtype=torch.bool)
