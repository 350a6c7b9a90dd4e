"""Where a step's scored episodes come from: `producer.next(step)`. Batch by batch here; continuously in rollout/continuous.py."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from statistics import fmean
from typing import Any, Protocol

from trainer.cluster.stopping import Stopped, Stopping
from trainer.configs.ppo import PpoConfig
from trainer.data.loader import Loader, Mixture
from trainer.environments.ahead import Ahead
from trainer.environments.pool import Environments, Rounds
from trainer.episodes import Episode
from trainer.online.clock import Clock
from trainer.online.processes import WorkerGroups
from trainer.online.scored import require_sampled
from trainer.rollout.engines import Pending

Group = list[Episode]  # answers to one prompt
Score = Callable[[list[Episode], int, Stopping], None]  # sets rewards; `rewards.scorer.Scorer.score` says what it raises


class Producer(Protocol):
    def sync_and_begin(self, step: int, clock: Clock) -> None:
        """All before `step` is learned: give the rollout engines the newest weights, and have them sample for `step` or go on sampling.

        Nothing where they do so already: with rollout.mode=one_step since `next` of the step before.
        """
        ...

    def next(self, step: int, stopping: Stopping, clock: Clock) -> list[Episode]:
        """The episodes that `step` learns from, with their rewards; groups are numbered from 0, and in one piece.

        Raises Stopped where `stopping` was set and the run is not to wait for them, Diverged where a ruined model sampled them, RunError at
        rollout.timeout, and as rewards do.
        """
        ...

    def settle(self) -> None:
        """Before the rollout engines get other weights for an evaluation: have done what is to be sampled with those that they have."""
        ...

    def metrics(self) -> dict[str, float]:
        """How the last step's episodes came about."""
        ...

    def state(self) -> dict[str, Any]:
        """JSON-able: which prompts were learned from. `load` continues from it; what was sampled and not learned is sampled again."""
        ...

    def load(self, state: dict[str, Any]) -> None:
        """Raises ConfigError where the state is of other data."""
        ...

    def close(self) -> None:
        """Nothing is sampled from here on."""
        ...


ROUNDS = 4  # rollout.extra_rounds, where that is not set


class Batches:
    """rollout.mode sync and one_step: all answers of a step are sampled together, with weights as of the step before, or one older.

    In sync, groups without a signal are replaced within the step (`rollout.no_signal`), and remax has its greedy answers sampled too.
    """

    def __init__(self, config: PpoConfig, workers: WorkerGroups, loader: Loader | Mixture, score: Score):
        self.config, self.workers, self.loader, self.score = config, workers, loader, score
        self.ahead = config.rollout.mode == "one_step"
        # Evaluations, which come in between, have processes of their own.
        self.pool = Environments(config, workers.model_path, workers.launcher) if self.ahead and config.environment.function else None
        self.pending: Pending | Rounds | Ahead | None = None
        self.position = loader.state()  # before the step that is sampled
        self.values: dict[str, float] = {}

    def sync_and_begin(self, step: int, clock: Clock) -> None:
        if self.pending is not None:
            return
        self.position = self.loader.state()
        if step <= self.config.trainer.steps:
            self.workers.sync()
            prompts, size, seed = self.loader.next(), self.config.algorithm.group_size, seed_of(self.config, step)
            if self.pool:
                self.pending = Ahead(self.pool.start(self.workers.engines, prompts, size, seed))
            else:
                self.pending = self.workers.start(prompts, size, seed)
        clock.lap("sync")

    def next(self, step: int, stopping: Stopping, clock: Clock) -> list[Episode]:
        assert self.pending is not None
        pending, position, self.pending = self.pending, self.position, None
        episodes = self.workers.episodes(pending)
        require_sampled(episodes, step)
        clock.lap("generate")
        if self.ahead:  # the next episodes are sampled while this step trains
            self.sync_and_begin(step + 1, clock)
        try:
            groups = self._scored(episodes, seed_of(self.config, step), step, stopping, clock)
            if self.config.rollout.no_signal == "replace":
                self._replace(groups, step, stopping, clock)
        except Stopped:
            self.position = position
            raise
        if self.config.algorithm.name == "remax":
            self.values["reward_greedy"] = fmean(group[0].baseline for group in groups)
        return [episode for group in groups for episode in group]

    def _scored(self, episodes: list[Episode], seed: int, step: int, stopping: Stopping, clock: Clock) -> list[Group]:
        """Groups with their rewards; with remax that of a greedy answer to the same prompt is their baseline."""
        groups = [list(group) for _, group in groupby(episodes, key=lambda episode: episode.group)]
        if self.config.algorithm.name != "remax":
            self.score(episodes, step, stopping)
            clock.lap("reward")
            return groups
        greedy = self.workers.episodes(self.workers.start([group[0].prompt for group in groups], 1, seed, greedy=True))
        greedy = [episode for episode in greedy if episode.part == 0]
        require_sampled(greedy, step)
        clock.lap("generate")
        for group, best in zip(groups, greedy, strict=True):
            best.group = group[0].group
        self.score([episode for group, best in zip(groups, greedy, strict=True) for episode in (*group, best)], step, stopping)
        clock.lap("reward")
        for group, best in zip(groups, greedy, strict=True):
            for episode in group:
                episode.baseline = best.reward
                episode.failed |= best.failed and self.config.reward.on_error == "drop"  # there is nothing to compare it with
        return groups

    def _replace(self, groups: list[Group], step: int, stopping: Stopping, clock: Clock) -> None:
        """Put groups of the next prompts in the places of those whose rewards are all alike, a few times over; then keep what there is.

        The loader's state before the next step is taken after this, so a run that resumes goes on with the prompts that follow.
        """
        replaced = thrown = 0
        for extra in range(1, (self.config.rollout.extra_rounds or ROUNDS) + 1):
            if not (vain := [place for place, group in enumerate(groups) if alike(group, self.config.algorithm.name)]):
                break
            seed = seed_of(self.config, step) + (extra << 8)  # rollout engines add their number
            prompts = self.loader.next(len(vain))
            episodes = self.workers.episodes(self.workers.start(prompts, self.config.algorithm.group_size, seed))
            require_sampled(episodes, step)
            clock.lap("generate")
            for episode in episodes:
                episode.group = vain[episode.group]
            for place, group in zip(vain, self._scored(episodes, seed, step, stopping, clock), strict=True):
                thrown += sum(len(episode.response_ids) for episode in groups[place])
                groups[place] = group
            replaced += len(vain)
        self.values |= {"no_signal": replaced / (replaced + len(groups)), "thrown_tokens": thrown}

    def settle(self) -> None:
        if isinstance(self.pending, Ahead):  # others have asked their engines for everything, which answer in order
            self.pending.settle()

    def metrics(self) -> dict[str, float]:
        return self.values

    def state(self) -> dict[str, Any]:
        return self.position

    def load(self, state: dict[str, Any]) -> None:
        self.loader.load(state)
        self.position = self.loader.state()

    def close(self) -> None:
        if self.pool:
            self.pool.close()


def alike(group: Group, algorithm: str) -> bool:
    """Whether nothing can be learned from these: their rewards, and with remax the baseline, are the same."""
    rewards = {episode.reward for episode in group if not episode.failed}
    return len(rewards | {group[0].baseline} if algorithm == "remax" and rewards else rewards) <= 1


def seed_of(config: PpoConfig, step: int) -> int:
    """Of a step's samples; rollout engines add their number, so steps are far apart."""
    return (config.run.seed << 32) + (step << 12)
