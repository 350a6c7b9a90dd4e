"""SAPO: a soft gate in place of clipping (https://arxiv.org/abs/2511.20347)."""

from __future__ import annotations

import torch

from trainer.configs.algorithm import AlgorithmConfig
from trainer.episodes import Batch


def sapo(algorithm: AlgorithmConfig, logp_N: torch.Tensor, log_ratio_N: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """-A * 4 / tau * sigmoid(tau * (ratio - 1)) per token (equations 5 and 6); tau is tau_pos where A > 0, and tau_neg elsewhere.

    At ratio 1 the gradient is that of -A * ratio; away from it the gate closes, and no token counts as clipped.
    """
    advantages_N = batch.tokens_N["advantages"]
    tau_N = torch.where(advantages_N > 0, algorithm.tau_pos, algorithm.tau_neg)
    gate_N = torch.sigmoid(tau_N * (log_ratio_N.exp() - 1)) * 4 / tau_N
    return -advantages_N * gate_N, torch.zeros_like(gate_N, dtype=torch.bool)
