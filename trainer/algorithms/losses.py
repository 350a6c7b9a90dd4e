"""Losses per token and the one way they are summed.

Every function works on flat tensors of N response tokens, whatever rows they were packed into. The sum divides by counts of the
*global* batch, so that loss and gradient do not depend on micro-batches, packing or the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from trainer.algorithms.kl import MAX_LOG_RATIO

Stats = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Denominators:
    """What a loss over a global batch is divided by; the same on every rank and for every micro-batch of an optimizer step."""

    tokens: float  # tokens with mask 1, all ranks
    sequences: float  # sequences with at least one such token, all ranks
    lengths_E: torch.Tensor  # tokens with mask 1 of each sequence that `episode_N` may name (those of this rank, or all)


def denominators(mask_N: torch.Tensor, episode_N: torch.Tensor, episodes: int) -> Denominators:
    """Count a batch of `episodes` sequences; with several ranks do it on the whole batch, then `part()` gives each rank its own."""
    lengths_E = torch.zeros(episodes, device=mask_N.device).index_add_(0, episode_N, mask_N.float())
    return Denominators(tokens=float(lengths_E.sum()), sequences=float((lengths_E > 0).sum()), lengths_E=lengths_E)


def part(whole: Denominators, chosen: list[int]) -> Denominators:
    """The same global counts for a rank that numbers its own sequences 0, 1, ...: its i-th is `chosen[i]` of the whole batch."""
    return Denominators(whole.tokens, whole.sequences, whole.lengths_E[chosen])


def aggregate(
    loss_N: torch.Tensor,
    mask_N: torch.Tensor,
    episode_N: torch.Tensor,
    mode: Literal["token", "sequence"],
    counts: Denominators,
) -> torch.Tensor:
    """One micro-batch's share of the global mean, a scalar; shares of all micro-batches and ranks add up to the loss.

    "token": every token weighs the same (DAPO); "sequence": every sequence does, its tokens sharing its weight (GRPO as first published).
    An engine that averages gradients over ranks must therefore be given share * ranks.
    """
    loss_N = torch.where(mask_N.bool(), loss_N, 0.0)  # not a product: what stands at masked tokens may be non-finite
    if mode == "token":
        return loss_N.sum() / max(counts.tokens, 1.0)
    if mode == "sequence":
        lengths_E = counts.lengths_E.to(loss_N.device)
        return (loss_N / lengths_E[episode_N].clamp(min=1.0)).sum() / max(counts.sequences, 1.0)
    raise ValueError(f"unknown aggregation {mode!r}; known are token, sequence")


def policy_loss(
    logp_N: torch.Tensor,
    old_N: torch.Tensor,
    advantages_N: torch.Tensor,
    mask_N: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    weight_N: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Stats]:
    """PPO's clipped loss per token [N] (https://arxiv.org/abs/1707.06347), the ratio within 1-clip_low and 1+clip_high.

    `dual_clip` c > 1 bounds the loss of tokens with a negative advantage by -c*A (https://arxiv.org/abs/1912.09729).
    `weight_N` is the importance weight of algorithms/importance_sampling.py.

    The statistics are sums over tokens with mask 1 (add them over micro-batches and ranks, divide by `tokens`): `ratio`, `clipped`
    (tokens whose gradient clipping removed) and `kl_old`, the k3 estimate of KL(old || current).
    """
    learnt_N = mask_N.bool()
    log_ratio_N = torch.where(learnt_N, logp_N - old_N, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_N = log_ratio_N.exp()
    free_N = -advantages_N * ratio_N
    loss_N = torch.maximum(free_N, -advantages_N * ratio_N.clamp(1 - clip_low, 1 + clip_high))
    clipped_N = loss_N > free_N
    if dual_clip is not None:
        bound_N = -advantages_N * dual_clip
        over_N = (advantages_N < 0) & (loss_N > bound_N)
        loss_N = torch.where(over_N, bound_N, loss_N)
        clipped_N = clipped_N | over_N
    if weight_N is not None:
        loss_N = loss_N * weight_N
    with torch.no_grad():
        stats = {
            "tokens": learnt_N.sum().float(),
            "ratio": torch.where(learnt_N, ratio_N, 0.0).sum(),
            "clipped": (clipped_N & learnt_N).sum().float(),
            "kl_old": (ratio_N - 1 - log_ratio_N).sum(),
        }
    return loss_N, stats


def value_loss(values_N: torch.Tensor, old_values_N: torch.Tensor, returns_N: torch.Tensor, clip: float | None) -> torch.Tensor:
    """Half the squared error per token [N]; with `clip` the worse of the value and of the value kept within +-clip of the old one."""
    loss_N = (values_N - returns_N).square()
    if clip is not None:
        near_N = old_values_N + (values_N - old_values_N).clamp(-clip, clip)
        loss_N = torch.maximum(loss_N, (near_N - returns_N).square())
    return loss_N / 2
