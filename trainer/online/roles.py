"""The driver's side of a training role: one call per optimizer step to all its ranks."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from trainer.cluster import placement
from trainer.cluster.launcher import Launcher
from trainer.configs.ppo import PpoConfig
from trainer.data.experts import experts_of
from trainer.data.packing import Flat, Sequence, flatten, select, split
from trainer.episodes import Episode
from trainer.models.heads import PolicyModel, ScoreModel, ValueModel
from trainer.models.others import is_classifier
from trainer.objectives.aggregation import denominators, part
from trainer.objectives.distillation import taught
from trainer.objectives.policy import policy
from trainer.objectives.value import value
from trainer.ranks import packed, teacher
from trainer.ranks.reduction import combine
from trainer.ranks.worker import Role, Tokens, Worker


@dataclass
class Rollout:
    """A step's episodes with their tokens laid end to end."""

    episodes: list[Episode]
    sequences: list[Sequence]
    flat: Flat
    kept: list[int]  # positions of the episodes that are learnt from, or compared with those; the mask is 0 throughout the others
    known_N: Tokens = field(default_factory=dict)  # what is known of each token once it was learnt from, for the record

    @classmethod
    def of(cls, episodes: list[Episode], left_out: Collection[int] = (), compared: Collection[int] = ()) -> Rollout:
        """`left_out`: positions of episodes that do not count; `compared`: of those that count for others alone, whose mask is 0 too."""
        flat, kept = flatten(episodes), [i for i in range(len(episodes)) if i not in left_out]
        if left_out or compared:
            mask_N = torch.zeros_like(flat.mask_N)
            where = select(flat.lengths_E, [i for i in kept if i not in compared])
            mask_N[where] = flat.mask_N[where]
            flat = replace(flat, mask_N=mask_N)
        sequences = [Sequence(e.prompt.token_ids, e.response_ids, experts=experts_of(e), pictures=e.pictures) for e in episodes]
        return cls(episodes, sequences, flat, kept)

    @property
    def tokens(self) -> int:
        return sum(s.length for s in self.sequences)


def roles_of(config: PpoConfig) -> list[Role]:
    """Who trains and who is asked in a run of reinforcement learning."""
    algorithm, place, updates = config.algorithm, config.placement, config.updates()
    others = {other.role: other.model for other in config.other_models()}
    said: dict[str, Any] = {"temperature": config.rollout.temperature, "learn_entropy": algorithm.entropy_coef > 0}
    asked, objective = partial(PolicyModel, **said), partial(policy, algorithm)
    head = asked
    if "teacher" in others:
        head, objective = partial(teacher.Student, **said, beta=config.teacher.beta), partial(taught, algorithm, config.teacher)
    alone = config.critic.head_start * algorithm.epochs * algorithm.minibatches if algorithm.name == "ppo" else 0
    # The reference chooses itself, as in verl: what it says of a text is not to depend on what another model took.
    more: dict[str, Any] = {"teacher": others.get("teacher"), "held": alone, "replay": config.rollout.router_replay}
    roles = [Role("policy", head, place.gpus_per_rank, config.optim, objective, updates, **more)]
    if algorithm.name == "ppo":
        own = others.get("critic")
        scores = own is not None and is_classifier(own)  # it has a head that knows what answers are worth
        of_critic: dict[str, Any] = {"optim": config.critic, "objective": partial(value, algorithm.value_clip), "updates": updates}
        head = ScoreModel if scores else ValueModel
        roles.append(Role("critic", head, place.gpus_per_rank, **of_critic, classifier=scores, model=own))
    if algorithm.kl.coef > 0:
        roles.append(Role("reference", asked, **_resources_of_reference(config), model=others.get("reference")))
    return roles


def _resources_of_reference(config: PpoConfig) -> dict[str, Any]:
    """The ranks' bundles, or its own."""
    bundle = placement.own_bundles(config).get("reference")
    if bundle is None:
        return {"gpus": config.placement.gpus_per_rank}
    return {"gpus": bundle.get("GPU", 0), "bundle": bundle, "gpus_setting": "placement.gpus_per_reference"}


class RoleGroup:
    """All ranks of one role. Roles share the ranks' bundles, so they take turns on the same devices, unless one has its own."""

    def __init__(self, config: PpoConfig, role: Role, model_path: str, launcher: Launcher, together: int):
        """`together` roles share the ranks' bundles."""
        self.config, self.role, self.launcher = config, role, launcher
        place = config.placement
        share = role.bundle or placement.rank_share(config, together)
        threads = placement.threads(place, place.cpus_per_rank)
        self.ranks: list[Any] = [
            launcher.start(
                *(Worker, config, role, i, place.ranks, model_path, threads),
                name=f"{role.name}-{i}",
                where=launcher.plan.rank_bundle(role.name, i),
                share=share,
                threads=threads,
            )
            for i in range(place.ranks)
        ]

    def start(self) -> list[Any]:
        """Begin starting; the references end when every rank has its model."""
        for rank in self.ranks:
            self.launcher.watch(rank, self.config.trainer.silence)
        seconds = self.config.trainer.timeout
        address, port = self.launcher.wait(self.ranks[0].address.remote(), seconds, f"starting the {self.role.name} (trainer.timeout)")
        return [rank.start.remote(address, port) for rank in self.ranks]

    def started(self) -> None:
        """Once its ranks have their model."""
        self.packing: dict[str, Any] = self.call("packing")[0]
        if self.packing["alone"]:
            print(f"{self.role.name}: {packed.SAYS}", flush=True)
        self.unreplayed: str = self.call("unreplayed")[0]

    def call(self, method: str, *args: Any) -> list[Any]:
        """The same call on every rank."""
        refs = [getattr(rank, method).remote(*args) for rank in self.ranks]
        return self.launcher.wait(refs, self.config.trainer.timeout, f"{self.role.name}.{method} (trainer.timeout)")

    def score(self, rollout: Rollout) -> torch.Tensor:
        """Log-probabilities or values of all response tokens, flat [N]."""
        shares, count = self._split(rollout, list(range(len(rollout.sequences))))
        refs = [rank.score.remote(self._sent(rollout, mine), count) for rank, mine in self._dealt(shares)]
        parts = self.launcher.wait(refs, self.config.trainer.timeout, f"{self.role.name}.score (trainer.timeout)")[:: self.shared]
        return self._laid(rollout, shares, parts)

    def _laid(self, rollout: Rollout, shares: list[list[int]], parts: list[torch.Tensor]) -> torch.Tensor:
        """What each group of ranks says of its sequences' tokens, in the order of all [N]."""
        out_N = torch.empty_like(rollout.flat.mask_N)
        for mine, values in zip(shares, parts, strict=True):
            out_N[select(rollout.flat.lengths_E, mine)] = values
        return out_N

    def said(self, rollout: Rollout) -> torch.Tensor:
        """The policy's log-probabilities of all response tokens [N] before the optimizer step that learned from all of them at once."""
        shares, _ = self._split(rollout, list(range(len(rollout.sequences))))
        return self._laid(rollout, shares, self.call("said")[:: self.shared])

    def train(self, rollout: Rollout, tokens_N: Tokens, step: int, **numbers: float) -> dict[str, float]:
        """All optimizer steps of one batch of episodes. Returns means over them."""
        algorithm = self.config.algorithm
        results = [
            self._optimizer_step(rollout, tokens_N, chosen, numbers)
            for chosen in minibatches(len(rollout.sequences), algorithm.epochs, algorithm.minibatches, (self.config.run.seed << 20) + step)
        ]
        return {name: sum(r[name] for r in results) / len(results) for name in results[0]}

    def _optimizer_step(self, rollout: Rollout, tokens_N: Tokens, chosen: list[int], numbers: dict[str, float]) -> dict[str, float]:
        flat = rollout.flat
        counts = denominators(flat.mask_N, flat.episode_N, len(rollout.sequences), self.config.max_response_tokens())
        if len(chosen) < len(rollout.sequences):
            lengths_E = counts.lengths_E[chosen]
            counts = replace(counts, tokens=float(lengths_E.sum()), sequences=float((lengths_E > 0).sum()))
        shares, count = self._split(rollout, chosen)
        refs = []
        for rank, mine in self._dealt(shares):
            where = select(flat.lengths_E, mine) if mine != list(range(len(rollout.sequences))) else slice(None)
            mine_N = {name: values[where] for name, values in tokens_N.items()}
            refs.append(rank.optimizer_step.remote(self._sent(rollout, mine), mine_N, part(counts, mine), count, numbers))
        parts = self.launcher.wait(refs, self.config.trainer.timeout, f"{self.role.name}.optimizer_step (trainer.timeout)")[:: self.shared]
        return combine(parts, counts.tokens)

    @property
    def shared(self) -> int:
        """So many consecutive ranks have the same sequences, and return the same."""
        return self.config.trainer.shared

    def _dealt(self, shares: list[list[int]]) -> list[tuple[Any, list[int]]]:
        """Each rank and its sequences."""
        return [(rank, shares[i // self.shared]) for i, rank in enumerate(self.ranks)]

    def _sent(self, rollout: Rollout, chosen: list[int]) -> list[Sequence]:
        """These sequences; a role that replays nothing needs no records of experts."""
        sequences = [rollout.sequences[i] for i in chosen]
        return sequences if self.role.replay != "off" else [s if s.experts is None else replace(s, experts=None) for s in sequences]

    def _split(self, rollout: Rollout, chosen: list[int]) -> tuple[list[list[int]], int]:
        """The sequences, of those chosen, of each group of ranks that share them, and the micro-batches that every rank must run."""
        lengths = [rollout.sequences[i].length for i in chosen]
        shares, count = split(lengths, len(self.ranks) // self.shared, **self.packing, together=self.role.together)
        return [[chosen[i] for i in share] for share in shares], count


def minibatches(episodes: int, epochs: int, count: int, seed: int) -> list[list[int]]:
    """Which episodes each optimizer step learns from: every epoch shuffles them anew and deals them to `count` steps."""
    if count == 1:
        return [list(range(episodes))] * epochs
    order = random.Random(seed)
    steps = []
    for _ in range(epochs):
        shuffled = order.sample(range(episodes), episodes)
        steps += [sorted(shuffled[i::count]) for i in range(count)]
    return steps
