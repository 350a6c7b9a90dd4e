"""On-policy distillation: the policy's distribution moves towards a teacher's at every token of its own answers.

The policy samples, so it learns where it goes itself, and a whole distribution per token says more than a reward per answer (GKD,
Agarwal et al. 2023, https://arxiv.org/abs/2306.13649, algorithm 1 with lambda = 1). Nothing flows back through the sampling.
"""

from __future__ import annotations

import math

import torch

from trainer.configs.algorithm import AlgorithmConfig
from trainer.configs.teacher import TeacherConfig
from trainer.episodes import Batch
from trainer.objectives import Stats
from trainer.objectives.aggregation import mean
from trainer.objectives.policy import policy


def taught(
    algorithm: AlgorithmConfig, teacher: TeacherConfig, batch: Batch, output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, Stats]:
    """`policy`'s loss plus `coef` times the mean divergence; with algorithm.name=distillation all advantages are 0, and so is the first.

    `output` are the log-probabilities, entropies and divergences [N] of `teacher.Student`. Adds divergence to the statistics.
    """
    logp_N, entropy_N, divergence_N = output
    loss, stats = policy(algorithm, batch, (logp_N, entropy_N))
    stats["divergence"] = (divergence_N.detach() * batch.tokens_N["mask"]).sum()
    return loss + teacher.coef * mean(divergence_N, batch, algorithm.aggregation), stats


def divergence(policy_NV: torch.Tensor, teacher_NV: torch.Tensor, beta: float) -> torch.Tensor:
    """Generalized Jensen-Shannon divergence [N] of two sets of log-probabilities over a vocabulary (GKD, equation 1).

    beta * KL(teacher || mix) + (1 - beta) * KL(policy || mix) with mix = beta * teacher + (1 - beta) * policy. At its ends it is 0, so
    there, as in TRL, stand what it tends to once divided by beta or 1 - beta: 0 gives KL(teacher || policy), 1 KL(policy || teacher).
    """
    if beta == 1:
        return kl(policy_NV, teacher_NV)
    if beta == 0:
        return kl(teacher_NV, policy_NV)
    mix_NV = torch.logaddexp(teacher_NV + math.log(beta), policy_NV + math.log1p(-beta))
    return beta * kl(teacher_NV, mix_NV) + (1 - beta) * kl(policy_NV, mix_NV)


def kl(of_NV: torch.Tensor, to_NV: torch.Tensor) -> torch.Tensor:
    """KL(of || to) [N] of log-probabilities."""
    return (of_NV.exp() * (of_NV - to_NV)).sum(-1)
