"""KL divergence from the reference model, per token, and the coefficient that holds it near a target.

Estimators of KL(policy || reference) from tokens that the policy wrote (http://joschu.net/blog/kl-approx.html), d = logp - ref:
k1 = d (unbiased, may be negative), k2 = d^2/2 (biased, small variance), k3 = exp(-d) + d - 1 (unbiased, never negative).
"""

from __future__ import annotations

from typing import Literal

import torch

Estimator = Literal["k1", "k2", "k3"]

# exp() of a larger log-ratio says nothing but "far away" and overflows float32 soon after.
MAX_LOG_RATIO = 20.0


def kl(logp_N: torch.Tensor, ref_N: torch.Tensor, estimator: Estimator) -> torch.Tensor:
    """The estimate per token [N]. As part of the reward use k1, whose expectation is the KL; as a loss use `kl_loss`."""
    diff_N = logp_N - ref_N
    if estimator == "k1":
        return diff_N
    if estimator == "k2":
        return diff_N.square() / 2
    if estimator == "k3":
        diff_N = diff_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return torch.exp(-diff_N) + diff_N - 1
    raise ValueError(f"unknown KL estimator {estimator!r}; known are k1, k2, k3")


def kl_loss(logp_N: torch.Tensor, ref_N: torch.Tensor, estimator: Estimator) -> torch.Tensor:
    """The value of `estimator` with the gradient of k2, per token [N].

    Differentiated token by token, k1 has an expected gradient of zero and k3 that of KL(reference || policy); k2 alone has that of
    KL(policy || reference) (https://arxiv.org/abs/2510.01555). So the estimator chooses what is reported, not where the policy goes.
    """
    slope_N = kl(logp_N, ref_N, "k2")
    return slope_N - slope_N.detach() + kl(logp_N, ref_N, estimator).detach()


class KlController:
    """The KL coefficient: fixed, or steered towards `target` per token (Ziegler et al. 2019, https://arxiv.org/abs/1909.08593)."""

    def __init__(self, coef: float, target: float | None = None, horizon: int = 10_000):
        self.coef = coef
        self.target = target
        self.horizon = horizon

    def update(self, kl_per_token: float, episodes: int) -> None:
        """Move the coefficient after `episodes` samples whose mean KL per token was `kl_per_token`, by at most a fifth per horizon."""
        if self.target is None:
            return
        error = min(max(kl_per_token / self.target - 1, -0.2), 0.2)
        self.coef *= 1 + error * min(episodes / self.horizon, 1.0)

    def state(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load(self, state: dict[str, float]) -> None:
        if self.target is not None:  # a fixed one is the setting's, which run.allow may have changed
            self.coef = state["coef"]
