"""Correction for rollout engines whose log-probabilities differ from the policy's: other kernels, other precision, older weights."""

from __future__ import annotations

from typing import Literal

import torch


def importance_weight(
    old_N: torch.Tensor,
    rollout_N: torch.Tensor,
    cap: float | None,
    mask_N: torch.Tensor | None = None,
    *,
    episode_N: torch.Tensor | None = None,
    mode: Literal["truncate", "mask"] = "truncate",
    low: float | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Importance weight exp(old - rollout) per token [N], detached (https://fengyao.notion.site/off-policy-rl).

    "truncate" takes min(weight, cap); "mask" takes 0 for what is above `cap` or below
    `low`, as IcePop does (https://arxiv.org/abs/2510.18855). With `episode_N` all tokens of an answer have one weight, the product over
    those of `mask_N`; then whole answers must be given.

    A token whose log-probability the rollout engine gave as non-finite is dropped: weight 0. With `cap` None the others weigh 1.
    The statistics cover the tokens of `mask_N` (all when None): sums `logprob_diff` of |old - rollout|, `capped`, `dropped` (masked ones
    too) and `tokens`, to be added over parts of a batch and divided by `tokens`; and `logprob_diff_max`.
    """
    with torch.no_grad():
        counted_N = torch.ones_like(old_N, dtype=torch.bool) if mask_N is None else mask_N.bool()
        finite_N = torch.isfinite(old_N) & torch.isfinite(rollout_N)
        diff_N = torch.where(finite_N, old_N - rollout_N, 0.0)
        weight_N, capped_N, out_N = torch.ones_like(diff_N), torch.zeros_like(finite_N), ~finite_N
        if cap is not None:
            raw_N = (diff_N if episode_N is None else _of_answers(diff_N * counted_N, episode_N)).exp()
            # exp() may reach infinity here; the cap takes it back.
            weight_N = raw_N.clamp(max=cap)
            if mode == "truncate":
                capped_N = weight_N == cap
            else:
                out_N = out_N | (raw_N > cap) | (raw_N < (low or 0.0))
        weight_N = torch.where(out_N, 0.0, weight_N)
        diff_N = diff_N.abs() * counted_N
        stats = {
            "logprob_diff": diff_N.sum(),
            "logprob_diff_max": diff_N.max() if len(diff_N) else diff_N.sum(),
            "capped": (counted_N & finite_N & capped_N).sum().float(),
            "dropped": (counted_N & out_N).sum().float(),
            "tokens": counted_N.sum().float(),
        }
    return weight_N, stats


def _of_answers(diff_N: torch.Tensor, episode_N: torch.Tensor) -> torch.Tensor:
    """The sum over each token's answer [N]."""
    answers = int(episode_N.max()) + 1 if len(episode_N) else 0
    return diff_N.new_zeros(answers).index_add_(0, episode_N, diff_N)[episode_N]
