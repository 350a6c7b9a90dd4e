"""Correction for rollout engines whose log-probabilities differ from the policy's: other kernels, other precision, older weights."""

from __future__ import annotations

import torch


def importance_weight(
    old_N: torch.Tensor, rollout_N: torch.Tensor, cap: float | None, mask_N: torch.Tensor | None = None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Truncated importance weight min(exp(old - rollout), cap) per token [N], detached (https://fengyao.notion.site/off-policy-rl).

    A token whose log-probability the rollout engine gave as non-finite is dropped: weight 0. With `cap` None the others weigh 1.
    The statistics cover the tokens of `mask_N` (all when None): sums `logprob_diff` of |old - rollout|, `capped`, `dropped` and
    `tokens`, to be added over parts of a batch and divided by `tokens`; and `logprob_diff_max`.
    """
    with torch.no_grad():
        counted_N = torch.ones_like(old_N, dtype=torch.bool) if mask_N is None else mask_N.bool()
        finite_N = torch.isfinite(old_N) & torch.isfinite(rollout_N)
        diff_N = torch.where(finite_N, old_N - rollout_N, 0.0)
        # exp() may reach infinity here; the cap takes it back.
        weight_N = torch.ones_like(diff_N) if cap is None else diff_N.exp().clamp(max=cap)
        weight_N = torch.where(finite_N, weight_N, 0.0)
        diff_N = diff_N.abs() * counted_N
        stats = {
            "logprob_diff": diff_N.sum(),
            "logprob_diff_max": diff_N.max() if len(diff_N) else diff_N.sum(),
            "capped": (counted_N & (weight_N == cap)).sum().float() if cap is not None else diff_N.new_zeros(()),
            "dropped": (counted_N & ~finite_N).sum().float(),
            "tokens": counted_N.sum().float(),
        }
    return weight_N, stats
