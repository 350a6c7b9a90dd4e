"""The one way in which losses per token are summed.

Every function works on flat tensors of N response tokens, whatever rows they were packed into. The sum divides by counts of the
*global* batch, so that loss and gradient do not depend on micro-batches, packing or the number of ranks.
"""

from __future__ import annotations

from typing import Literal

import torch

from trainer.episodes import Batch, Denominators

Aggregation = Literal["token", "sequence", "constant"]


def denominators(mask_N: torch.Tensor, episode_N: torch.Tensor, episodes: int, limit: float = 1.0) -> Denominators:
    """Count a batch of `episodes` sequences; with several ranks do it on the whole batch, then `part()` gives each rank its own.

    `limit`: tokens that a sequence may have, for the mode "constant".
    """
    lengths_E = torch.zeros(episodes, device=mask_N.device).index_add_(0, episode_N, mask_N.float())
    return Denominators(tokens=float(lengths_E.sum()), sequences=float((lengths_E > 0).sum()), lengths_E=lengths_E, limit=limit)


def part(whole: Denominators, chosen: list[int]) -> Denominators:
    """The same global counts for a rank that numbers its own sequences 0, 1, ...: its i-th is `chosen[i]` of the whole batch."""
    return Denominators(whole.tokens, whole.sequences, whole.lengths_E[chosen], whole.limit)


def aggregate(
    loss_N: torch.Tensor,
    mask_N: torch.Tensor,
    episode_N: torch.Tensor,
    mode: Aggregation,
    counts: Denominators,
) -> torch.Tensor:
    """One micro-batch's share of the global mean, a scalar; shares of all micro-batches and ranks add up to the loss.

    "token": every token weighs the same (DAPO); "sequence": every sequence does, its tokens sharing its weight (GRPO as first published);
    "constant": every token weighs 1 / limit of a sequence, however long its own and the others are, so that long wrong answers are not
    spared (Dr. GRPO, https://arxiv.org/abs/2503.20783, section 3.2).
    An engine that averages gradients over ranks must therefore be given share * ranks.
    """
    loss_N = torch.where(mask_N.bool(), loss_N, 0.0)  # not a product: what stands at masked tokens may be non-finite
    if mode == "token":
        return loss_N.sum() / max(counts.tokens, 1.0)
    if mode == "sequence":
        lengths_E = counts.lengths_E.to(loss_N.device)
        return (loss_N / lengths_E[episode_N].clamp(min=1.0)).sum() / max(counts.sequences, 1.0)
    if mode == "constant":
        return loss_N.sum() / (max(counts.sequences, 1.0) * counts.limit)
    raise ValueError(f"unknown aggregation {mode!r}; known are token, sequence, constant")


def mean(loss_N: torch.Tensor, batch: Batch, mode: Aggregation = "token") -> torch.Tensor:
    """`aggregate` with the mask and the counts that came with the micro-batch."""
    assert batch.counts is not None, "a batch to learn from has counts"
    return aggregate(loss_N, batch.tokens_N["mask"], batch.episode_N, mode, batch.counts)
