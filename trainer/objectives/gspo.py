"""GSPO: PPO's clipped loss with one ratio for all tokens of an answer (https://arxiv.org/abs/2507.18071)."""

from __future__ import annotations

import torch

from trainer.configs.algorithm import AlgorithmConfig
from trainer.episodes import Batch
from trainer.objectives.clip import clipped


def gspo(algorithm: AlgorithmConfig, logp_N: torch.Tensor, log_ratio_N: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """GSPO-token (equations 13 and 14): the ratio is exp of the answer's mean log-ratio (equation 7), its gradient the token's own.

    Where all tokens of an answer have the same advantage and weight, loss and gradient are those of GSPO itself (equation 5); tokens
    may differ, as ppo's do. A micro-batch has whole answers, so the mean is at hand.
    """
    assert batch.counts is not None, "a batch to learn from has counts"
    with torch.no_grad():
        lengths_E = batch.counts.lengths_E.to(log_ratio_N.device)
        sum_E = torch.zeros_like(lengths_E).index_add_(0, batch.episode_N, log_ratio_N)
        mean_N = (sum_E / lengths_E.clamp(min=1.0))[batch.episode_N]
    ratio_N = (mean_N + log_ratio_N - log_ratio_N.detach()).exp()
    return clipped(ratio_N, batch.tokens_N["advantages"], algorithm.clip_low, algorithm.clip_high)
