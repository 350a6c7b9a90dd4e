"""Maximum likelihood of given answers: cross-entropy per token, on the answers alone (as in https://arxiv.org/abs/2203.02155, step 1)."""

from __future__ import annotations

import torch

from trainer.configs.algorithm import LossConfig
from trainer.episodes import Batch
from trainer.objectives import Stats
from trainer.objectives.aggregation import mean


def supervised(algorithm: LossConfig, batch: Batch, output: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, Stats]:
    """`output` are the log-probabilities [N] and entropies [N] of the answers' tokens. `tokens_N` has the mask."""
    logp_N, _ = output
    return mean(-logp_N, batch, algorithm.aggregation), {}
