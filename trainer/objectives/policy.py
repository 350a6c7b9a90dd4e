"""Policy gradients: PPO's clipped loss, an entropy bonus and the KL divergence from a reference model."""

from __future__ import annotations

import torch

from trainer.algorithms.importance_sampling import importance_weight
from trainer.algorithms.kl import MAX_LOG_RATIO, kl, kl_loss
from trainer.configs.sections import AlgorithmConfig
from trainer.episodes import Batch
from trainer.objectives import Stats
from trainer.objectives.aggregation import mean


def policy(algorithm: AlgorithmConfig, batch: Batch, output: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, Stats]:
    """`output` are the log-probabilities [N] and entropies [N] of the batch's targets.

    `tokens_N` has mask, advantages and rollout (the rollout engine's log-probabilities); old, where the policy was asked before it
    learnt; reference, where there is a reference model. `numbers` has kl_coef. Adds to the statistics of `policy_loss`: kl from the
    reference, entropy, and logprob_diff and dropped of `importance_weight`.
    """
    t, (logp_N, entropy_N) = batch.tokens_N, output
    # Without old log-probabilities this is the only update on these episodes: old and current policy are the same.
    old_N = t["old"] if "old" in t else logp_N.detach()
    weight_N, mismatch = importance_weight(old_N, t["rollout"], algorithm.importance_cap, t["mask"])
    loss_N, stats = policy_loss(
        logp_N,
        old_N,
        t["advantages"],
        t["mask"],
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip,
        weight_N=weight_N,
    )
    if algorithm.entropy_coef:
        loss_N = loss_N - algorithm.entropy_coef * entropy_N
    if "reference" in t:
        with torch.no_grad():
            stats["kl"] = (kl(logp_N, t["reference"], algorithm.kl.estimator) * t["mask"]).sum()
        if algorithm.kl.where == "loss":
            loss_N = loss_N + batch.numbers["kl_coef"] * kl_loss(logp_N, t["reference"], algorithm.kl.estimator)
    stats |= {name: mismatch[name] for name in ("logprob_diff", "dropped")}
    stats["entropy"] = (entropy_N.detach() * t["mask"]).sum()
    return mean(loss_N, batch, algorithm.aggregation), stats


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
    `weight_N` is the importance weight of trainer/algorithms/importance_sampling.py.

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
