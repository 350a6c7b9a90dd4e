"""A step's episodes once they are scored: which are learnt from, with which advantages, and what they were like."""

from __future__ import annotations

import math
from collections import Counter
from math import comb
from statistics import fmean

import torch

from trainer.configs.algorithm import AlgorithmConfig
from trainer.configs.ppo import PpoConfig
from trainer.configs.reward import OverlongConfig, RewardConfig
from trainer.data.packing import flatten, select
from trainer.episodes import Episode
from trainer.errors import ConfigError
from trainer.objectives.advantages import Estimate, estimate
from trainer.online.roles import Rollout
from trainer.rewards.verifiable import overlong
from trainer.runs.divergence import RUINED, Diverged

ONE_EACH = ("grpo", "dr_grpo", "rloo", "remax")  # have one advantage for an episode
OVERLONG = "overlong"  # the term of reward.overlong


def require_sampled(episodes: list[Episode], step: int) -> None:
    """Raises Diverged where answers were sampled by a ruined model."""
    for episode in episodes:
        for turn in episode.turns:
            if not math.isfinite(sum(turn.logprobs)):
                bad = next(version for version, p in zip(turn.versions, turn.logprobs, strict=True) if not math.isfinite(p))
                raise Diverged(step, bad, RUINED)


def punish_overlong(episodes: list[Episode], config: OverlongConfig, max_new_tokens: int) -> None:
    """Take off their rewards what DAPO's soft punishment says (https://arxiv.org/abs/2503.14476, equation 13); a term from now on.

    Answers without a reward get none.
    """
    if config.buffer:
        for episode in (e for e in episodes if not e.failed):
            cost = overlong("", {}, config.max_length or max_new_tokens, config.buffer, token_ids=episode.response_ids)
            episode.reward += cost
            episode.terms = {**episode.terms, OVERLONG: cost}


def advantages(
    algorithm: AlgorithmConfig, rollout: Rollout, values_N: torch.Tensor | None, kl_N: torch.Tensor | None, kl_coef: float
) -> Estimate:
    """Advantages and returns [N] of the episodes that are learnt from, compared with one another alone; 0 for the others.

    Of an episode in several sequences the first one is compared, and the others get its advantage; with PPO and REINFORCE++, which have
    one for each token, all sequences are.
    """
    flat, kept = rollout.flat, rollout.kept
    parts = algorithm.name in ONE_EACH and any(rollout.episodes[i].part for i in kept)
    if parts:
        kept = [i for i in kept if not rollout.episodes[i].part]
    # Of what the first sequence wrote, learned from or not (algorithm.mask_truncated): the others get its advantage.
    written_N = flatten(rollout.episodes).mask_N if parts else flat.mask_N
    chosen = [rollout.episodes[i] for i in kept]
    where = slice(None) if len(chosen) == len(rollout.episodes) else select(flat.lengths_E, kept)
    advantages_n, returns_n = estimate(
        algorithm,
        torch.tensor([e.reward for e in chosen]),
        torch.tensor([e.group for e in chosen]),
        flat.lengths_E[kept],
        written_N[where],
        None if values_N is None else values_N[where],
        None if kl_N is None else kl_N[where],
        kl_coef,
        torch.tensor([e.baseline for e in chosen]),
    )
    if isinstance(where, slice):
        return advantages_n, returns_n

    def spread(x_n: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(flat.mask_N).index_copy_(0, where, x_n)

    if parts:
        return _as_the_first(spread(advantages_n), written_N, rollout), None
    return spread(advantages_n), None if returns_n is None else spread(returns_n)


def _as_the_first(advantages_N: torch.Tensor, written_N: torch.Tensor, rollout: Rollout) -> torch.Tensor:
    """With the advantage of an episode's first sequence on all that is learned of those that follow it."""
    lengths = rollout.flat.lengths_E.tolist()
    first_E, first = [], advantages_N.new_zeros(())
    for episode, written, own in zip(rollout.episodes, written_N.split(lengths), advantages_N.split(lengths), strict=True):
        if episode.part == 0:
            first = own[written.bool()][:1].sum()  # the same on all of its tokens
        first_E.append(first)
    return torch.stack(first_E).repeat_interleave(rollout.flat.lengths_E) * rollout.flat.mask_N


def evaluation(episodes: list[Episode], config: PpoConfig) -> dict[str, float]:
    """Mean reward, and pass@k where prompts have several answers. Answers without a reward pass not; dropped, they are not in the mean."""
    schedule = config.trainer
    episodes = [e for e in episodes if e.part == 0]
    counted = [e.reward for e in episodes if not (e.failed and config.reward.on_error == "drop")]
    mean = {"eval_reward": sum(counted) / len(counted)} if counted else {}
    if schedule.eval_samples == 1:
        return mean
    passed = Counter({e.group: 0 for e in episodes})
    passed.update(e.group for e in episodes if not e.failed and e.reward >= schedule.eval_pass)
    return mean | pass_at(list(passed.values()), schedule.eval_samples)


def evaluations(by_set: dict[str, list[Episode]], config: PpoConfig) -> dict[str, float]:
    """Of each set, as eval_reward/NAME; "" is what data holds out. Without that, eval_reward is the mean over the sets that have one: of a
    set whose answers are all dropped there is none."""
    each = {name: evaluation(episodes, config) for name, episodes in by_set.items()}
    found = {f"{key}/{name}" if name else key: value for name, values in each.items() for key, value in values.items()}
    if "" in by_set:
        return found
    rewards = [values["eval_reward"] for values in each.values() if "eval_reward" in values]
    return ({"eval_reward": fmean(rewards)} if rewards else {}) | found


def pass_at(passed_P: list[int], samples: int) -> dict[str, float]:
    """Share of prompts of which one of k answers passes, for k = 1, 2, 4, ... and `samples`, of which so many passed for each prompt.

    Without bias: the mean of 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, https://arxiv.org/abs/2107.03374, eq. 1).
    """
    sizes = sorted({samples, *(2**i for i in range(samples.bit_length()) if 2**i <= samples)})
    return {f"eval_pass@{k}": sum(1 - comb(samples - c, k) / comb(samples, k) for c in passed_P) / len(passed_P) for k in sizes}


def left_out(config: PpoConfig, episodes: list[Episode]) -> set[int]:
    """Positions of the episodes without a reward, where reward.on_error drops them, and of those that have none left to be compared with.

    Raises ConfigError where that leaves nothing.
    """
    if config.reward.on_error != "drop":
        return set()
    algorithm = config.algorithm
    compared = algorithm.name in ("grpo", "dr_grpo", "rloo") or (algorithm.name == "reinforce_plus_plus" and algorithm.baseline)
    sizes = Counter(e.group for e in episodes if not e.failed and e.part == 0)
    least = 2 if compared and algorithm.group_size > 1 else 1
    left = {i for i, e in enumerate(episodes) if e.failed or sizes[e.group] < least}
    if len(left) == len(episodes):
        raise ConfigError(f"reward.on_error=drop: failed rewards leave no group with {least} answers to learn from")
    return left


def truncated(config: PpoConfig, episodes: list[Episode]) -> set[int]:
    """Positions of those that algorithm.mask_truncated keeps the policy from learning from."""
    return {i for i, episode in enumerate(episodes) if not episode.finished} if config.algorithm.mask_truncated else set()


def describe(rollout: Rollout, config: RewardConfig, *, with_environment: bool = False) -> dict[str, float]:
    """What the episodes that are learnt from were like, and how many rewards failed."""
    kept = [rollout.episodes[i] for i in rollout.kept]
    rewards_E = torch.tensor([e.reward for e in kept])
    scored = [e.terms for e in kept if e.terms]
    played = _of_environment(kept) if with_environment else {}
    names = [*config.term_weights(), *([OVERLONG] if config.overlong.buffer else [])]
    terms = {f"reward/{name}": sum(terms[name] for terms in scored) / len(scored) for name in names if scored}
    of_source: dict[str, list[float]] = {}
    for episode in kept:
        if "mix" in episode.prompt.row:
            of_source.setdefault(episode.prompt.row["mix"], []).append(episode.reward)
    failed = {} if config.on_error == "fail" else {"reward_failed": sum(e.failed for e in rollout.episodes) / len(rollout.episodes)}
    return {
        "reward": float(rewards_E.mean()),
        "reward_std": float(rewards_E.std(unbiased=False)),
        **terms,
        **{f"reward_of/{name}": fmean(rewards) for name, rewards in of_source.items()},
        **failed,
        "response_tokens": sum(len(turn.token_ids) for e in kept for turn in e.turns if turn.sampled) / len(kept),
        "truncated": sum(not e.finished for e in kept) / len(kept),
        **played,
    }


def _of_environment(episodes: list[Episode]) -> dict[str, float]:
    """Of an episode: turns of the policy, whether a limit ended it, what its environment counted."""
    first = [episode for episode in episodes if episode.part == 0]
    names = sorted({name for episode in first for name in episode.metrics})
    return {
        "turns": sum(turn.sampled for episode in episodes for turn in episode.turns) / len(first),
        "limited": sum(episode.limited for episode in first) / len(first),
        **{f"environment/{name}": fmean(episode.metrics.get(name, 0.0) for episode in first) for name in names},
    }
