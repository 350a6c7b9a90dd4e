"""Policy gradients: one of the losses of `LOSSES`, an entropy bonus and the KL divergence from a reference model."""

from __future__ import annotations

from collections.abc import Callable

import torch

from trainer.configs.algorithm import AlgorithmConfig
from trainer.episodes import Batch
from trainer.objectives import Stats
from trainer.objectives.aggregation import mean
from trainer.objectives.cispo import cispo
from trainer.objectives.clip import clip
from trainer.objectives.gspo import gspo
from trainer.objectives.importance_sampling import importance_weight
from trainer.objectives.kl import MAX_LOG_RATIO, kl, kl_loss
from trainer.objectives.sapo import sapo

# (settings, logp_N, log_ratio_N, batch) -> loss per token [N], and the tokens whose gradient it removed [N]. `log_ratio_N` is logp - old,
# within +-MAX_LOG_RATIO, 0 at tokens with mask 0, where whatever is returned does not count.
Loss = Callable[[AlgorithmConfig, torch.Tensor, torch.Tensor, Batch], tuple[torch.Tensor, torch.Tensor]]
LOSSES: dict[str, Loss] = {"clip": clip, "gspo": gspo, "cispo": cispo, "sapo": sapo}


def policy(algorithm: AlgorithmConfig, batch: Batch, output: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, Stats]:
    """`output` are the log-probabilities [N] and entropies [N] of the batch's targets.

    `tokens_N` has mask, advantages and rollout (the rollout engine's log-probabilities); old, where the policy was asked before it
    learnt; reference, where there is a reference model. `numbers` has kl_coef. Adds to the statistics of `policy_loss`: kl from the
    reference, entropy, and logprob_diff and dropped of `importance_weight`.
    """
    t, (logp_N, entropy_N) = batch.tokens_N, output
    # Without old log-probabilities this is the only update on these episodes: old and current policy are the same.
    old_N = t["old"] if "old" in t else logp_N.detach()
    weight_N, mismatch = importance_weight(
        old_N,
        t["rollout"],
        algorithm.importance_cap,
        t["mask"],
        episode_N=batch.episode_N if algorithm.importance_level == "sequence" else None,
        mode=algorithm.importance_mode,
        low=algorithm.importance_low,
    )
    loss_N, stats = policy_loss(algorithm, batch, logp_N, old_N)
    loss_N = loss_N * weight_N
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


def policy_loss(algorithm: AlgorithmConfig, batch: Batch, logp_N: torch.Tensor, old_N: torch.Tensor) -> tuple[torch.Tensor, Stats]:
    """The loss that `algorithm.loss` names, per token [N], before any importance weight.

    The statistics are sums over tokens with mask 1 (add them over micro-batches and ranks, divide by `tokens`): `ratio`, `clipped`
    (tokens whose gradient the loss removed) and `kl_old`, the k3 estimate of KL(old || current).
    """
    learnt_N = batch.tokens_N["mask"].bool()
    log_ratio_N = torch.where(learnt_N, logp_N - old_N, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    loss_N, clipped_N = LOSSES[algorithm.loss](algorithm, logp_N, log_ratio_N, batch)
    with torch.no_grad():
        ratio_N = log_ratio_N.exp()
        stats = {
            "tokens": learnt_N.sum().float(),
            "ratio": torch.where(learnt_N, ratio_N, 0.0).sum(),
            "clipped": (clipped_N & learnt_N).sum().float(),
            "kl_old": (ratio_N - 1 - log_ratio_N).sum(),
        }
    return loss_N, stats
