"""Advantages: how much better an answer, or a token, was than expected.

Axes: E episodes, N tokens of all responses laid end to end, T tokens of the longest episode. `lengths_E` adds up to N. `mask_N` is 1
where the policy wrote the token and 0 where a tool did. All float32, no gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from trainer.configs.algorithm import AlgorithmConfig

Estimate = tuple[torch.Tensor, torch.Tensor | None]


def group_mean(rewards_E: torch.Tensor, group_E: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and size of each episode's group, both [E]."""
    groups = int(group_E.max()) + 1 if len(group_E) else 0
    sum_G = rewards_E.new_zeros(groups).index_add_(0, group_E, rewards_E)
    size_G = rewards_E.new_zeros(groups).index_add_(0, group_E, torch.ones_like(rewards_E))
    return (sum_G / size_G)[group_E], size_G[group_E]


def group_relative(rewards_E: torch.Tensor, group_E: torch.Tensor, *, normalize: bool) -> torch.Tensor:
    """Reward minus the group's mean [E]; with `normalize` divided by the group's standard deviation + 1e-4.

    GRPO (https://arxiv.org/abs/2402.03300) normalizes; Dr. GRPO (https://arxiv.org/abs/2503.20783) does not, because that weighs up
    questions that are nearly always or nearly never solved. The deviation has Bessel's correction (n - 1), as torch.std and TRL have.
    A group with one reward, or with equal ones, gets zeros: in float64, as the mean of equal float32 numbers is not always that number.
    """
    mean_E, size_E = group_mean(rewards_E.double(), group_E)
    centred_E = rewards_E - mean_E
    if normalize:
        variance_E = group_mean(centred_E.square(), group_E)[0] * size_E / (size_E - 1).clamp(min=1)
        centred_E = centred_E / (variance_E.sqrt() + 1e-4)
    return centred_E.to(rewards_E.dtype)


def leave_one_out(rewards_E: torch.Tensor, group_E: torch.Tensor) -> torch.Tensor:
    """RLOO (https://arxiv.org/abs/2402.14740): reward minus the mean of the group's other rewards [E]; an only one has no baseline."""
    mean_E, size_E = group_mean(rewards_E.double(), group_E)
    others_E = (mean_E * size_E - rewards_E) / (size_E - 1).clamp(min=1)
    return (rewards_E - others_E).to(rewards_E.dtype)


def whiten(x_N: torch.Tensor, mask_N: torch.Tensor) -> torch.Tensor:
    """Mean 0 and variance 1 over all tokens with mask 1 of the global batch; 0 elsewhere [N]."""
    mask_N = mask_N.to(x_N.dtype)
    count = mask_N.sum().clamp(min=1)
    centred_N = torch.where(mask_N.bool(), x_N - torch.where(mask_N.bool(), x_N, 0.0).sum() / count, 0.0)
    variance = centred_N.square().sum() / count
    return centred_N * torch.rsqrt(variance + 1e-8)


def token_rewards(
    scores_E: torch.Tensor, kl_N: torch.Tensor | None, mask_N: torch.Tensor, lengths_E: torch.Tensor, coef: float
) -> torch.Tensor:
    """-coef * kl at each token with mask 1, plus the score at the last of them in each episode [N]; 0 at other tokens."""
    rewards_N = torch.zeros_like(mask_N, dtype=torch.float32)
    if kl_N is not None:
        rewards_N = torch.where(mask_N.bool(), -coef * kl_N, 0.0)
    episode_N = torch.repeat_interleave(torch.arange(len(lengths_E), device=lengths_E.device), lengths_E)
    written = torch.nonzero(mask_N, as_tuple=True)[0]
    last_E = torch.full_like(lengths_E, -1).scatter_reduce_(0, episode_N[written], written, "amax")
    has_E = last_E >= 0
    rewards_N[last_E[has_E]] += scores_E[has_E]
    return rewards_N


def gae(
    rewards_N: torch.Tensor, values_N: torch.Tensor, mask_N: torch.Tensor, lengths_E: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalized advantage estimation (https://arxiv.org/abs/1506.02438): advantages and returns, both [N], 0 at tokens with mask 0.

    A tool's tokens are no actions: value and advantage pass over them unchanged, as if they were not there. Returns are advantages
    (not whitened) + values. An episode ends after its last token, cut off or not.
    """
    written_N = mask_N.bool()
    episode_N = torch.repeat_interleave(torch.arange(len(lengths_E), device=lengths_E.device), lengths_E)
    steps_E = torch.bincount(episode_N[written_N], minlength=len(lengths_E)).tolist()
    rewards_TE = torch.nn.utils.rnn.pad_sequence(list(rewards_N[written_N].split(steps_E)))
    values_TE = torch.nn.utils.rnn.pad_sequence(list(values_N[written_N].split(steps_E)))
    advantages_TE = torch.zeros_like(values_TE)
    # Zeros behind an episode's end leave `advantage` at 0 until its last token is reached.
    advantage_E = next_value_E = values_TE.new_zeros(len(lengths_E))
    for t in range(len(values_TE) - 1, -1, -1):
        advantage_E = rewards_TE[t] + gamma * next_value_E - values_TE[t] + gamma * lam * advantage_E
        next_value_E = values_TE[t]
        advantages_TE[t] = advantage_E
    advantages_N = torch.zeros_like(values_N)
    advantages_N[written_N] = torch.cat([advantages_TE[:n, e] for e, n in enumerate(steps_E)])
    return advantages_N, torch.where(written_N, advantages_N + values_N, 0.0)


def returns_to_go(rewards_N: torch.Tensor, mask_N: torch.Tensor, lengths_E: torch.Tensor, gamma: float) -> torch.Tensor:
    """Discounted sum of the rewards from each token on [N], tool tokens passed over: GAE without values at lambda 1."""
    return gae(rewards_N, torch.zeros_like(rewards_N), mask_N, lengths_E, gamma, lam=1.0)[0]


def reinforce_plus_plus(
    rewards_E: torch.Tensor,
    group_E: torch.Tensor,
    kl_N: torch.Tensor | None,
    mask_N: torch.Tensor,
    lengths_E: torch.Tensor,
    *,
    kl_coef: float,
    gamma: float,
    baseline: bool = True,
) -> torch.Tensor:
    """REINFORCE++ (https://arxiv.org/abs/2501.03262): returns to go of score and KL, whitened over all tokens of the global batch [N].

    With `baseline`, and groups of several answers, the score is first compared with the group's mean: its "baseline" variant.
    """
    mean_E, size_E = group_mean(rewards_E.double(), group_E)
    scores_E = torch.where(size_E > 1, rewards_E - mean_E, rewards_E.double()).to(rewards_E.dtype) if baseline else rewards_E
    rewards_N = token_rewards(scores_E, kl_N, mask_N, lengths_E, kl_coef)
    return whiten(returns_to_go(rewards_N, mask_N, lengths_E, gamma), mask_N)


@dataclass(frozen=True)
class Signals:
    """All that an advantage may be computed from."""

    algorithm: AlgorithmConfig
    rewards_E: torch.Tensor
    group_E: torch.Tensor
    lengths_E: torch.Tensor
    mask_N: torch.Tensor
    values_N: torch.Tensor | None
    kl_N: torch.Tensor | None
    kl_coef: float
    baselines_E: torch.Tensor | None

    def scores_E(self) -> torch.Tensor:
        """Rewards less the KL of the whole answer, for methods that know one reward per answer."""
        if self.kl_N is None:
            return self.rewards_E
        episode_N = torch.repeat_interleave(torch.arange(len(self.lengths_E), device=self.lengths_E.device), self.lengths_E)
        kl_N = torch.where(self.mask_N.bool(), self.kl_N, 0.0)
        return self.rewards_E - self.kl_coef * torch.zeros_like(self.rewards_E).index_add_(0, episode_N, kl_N)

    def spread(self, advantages_E: torch.Tensor) -> torch.Tensor:
        """Each token gets its answer's advantage [N], 0 where a tool wrote."""
        return torch.repeat_interleave(advantages_E, self.lengths_E) * self.mask_N


def _grpo(s: Signals) -> Estimate:
    return s.spread(group_relative(s.scores_E(), s.group_E, normalize=True)), None


def _dr_grpo(s: Signals) -> Estimate:
    return s.spread(group_relative(s.scores_E(), s.group_E, normalize=False)), None


def _rloo(s: Signals) -> Estimate:
    return s.spread(leave_one_out(s.scores_E(), s.group_E)), None


def _reinforce_plus_plus(s: Signals) -> Estimate:
    its = {"kl_coef": s.kl_coef, "gamma": s.algorithm.gamma, "baseline": s.algorithm.baseline}
    return reinforce_plus_plus(s.rewards_E, s.group_E, s.kl_N, s.mask_N, s.lengths_E, **its), None


def _remax(s: Signals) -> Estimate:
    """ReMax (https://arxiv.org/abs/2310.10505, algorithm 1): reward minus that of the greedy answer to the same prompt."""
    if s.baselines_E is None:
        raise ValueError("remax needs the rewards of greedy answers")
    return s.spread(s.scores_E() - s.baselines_E), None


def _ppo(s: Signals) -> Estimate:
    if s.values_N is None:
        raise ValueError("ppo needs the critic's values")
    rewards_N = token_rewards(s.rewards_E, s.kl_N, s.mask_N, s.lengths_E, s.kl_coef)
    advantages_N, returns_N = gae(rewards_N, s.values_N, s.mask_N, s.lengths_E, s.algorithm.gamma, s.algorithm.lam)
    return whiten(advantages_N, s.mask_N), returns_N


def _none(s: Signals) -> Estimate:
    """Distillation: the teacher says what is better, not the reward."""
    return torch.zeros_like(s.mask_N), None


ADVANTAGES: dict[str, Callable[[Signals], Estimate]] = {
    "grpo": _grpo,
    "dr_grpo": _dr_grpo,
    "rloo": _rloo,
    "reinforce_plus_plus": _reinforce_plus_plus,
    "remax": _remax,
    "ppo": _ppo,
    "distillation": _none,
}


def estimate(
    algorithm: AlgorithmConfig,
    rewards_E: torch.Tensor,
    group_E: torch.Tensor,
    lengths_E: torch.Tensor,
    mask_N: torch.Tensor,
    values_N: torch.Tensor | None = None,
    kl_N: torch.Tensor | None = None,
    kl_coef: float = 0.0,
    baselines_E: torch.Tensor | None = None,
) -> Estimate:
    """Advantages [N] and, for ppo, returns [N], over the global batch.

    `kl_N` is given only where the KL is part of the reward (kl.where = "reward"); use the k1 estimate. `values_N` is ppo's critic.
    `baselines_E` are remax's: the rewards of greedy answers.
    """
    signals = Signals(algorithm, rewards_E, group_E, lengths_E, mask_N, values_N, kl_N, kl_coef, baselines_E)
    return ADVANTAGES[algorithm.name](signals)
