"""Where a step's scored episodes come from: `producer.next(step)`. Batch by batch here; continuously in rollout/continuous.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from trainer.clock import Clock
from trainer.configs.ppo import PpoConfig
from trainer.data.loader import Loader, Mixture
from trainer.divergence import require_sampled
from trainer.episodes import Episode
from trainer.rollout.engines import Pending
from trainer.stopping import Stopped, Stopping
from trainer.worker_groups import WorkerGroups

Score = Callable[[list[Episode], int, Stopping], None]  # sets rewards; `rewards.scorer.Scorer.score` says what it raises


class Producer(Protocol):
    def begin(self, step: int, clock: Clock) -> None:
        """All before `step` is learned: give the rollout engines the weights, if they wait for them, and go on."""
        ...

    def next(self, step: int, stopping: Stopping, clock: Clock) -> list[Episode]:
        """The episodes that `step` learns from, with their rewards; groups are numbered from 0, and in one piece.

        Raises Stopped where `stopping` was set and the run is not to wait for them, Diverged where a ruined model sampled them, RunError at
        rollout.timeout, and as rewards do.
        """
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


class Batches:
    """rollout.mode sync and one_step: all answers of a step are sampled together, with weights as of the step before, or one older."""

    def __init__(self, config: PpoConfig, workers: WorkerGroups, loader: Loader | Mixture, score: Score):
        self.config, self.workers, self.loader, self.score = config, workers, loader, score
        self.ahead = config.rollout.mode == "one_step"
        self.pending: Pending | None = None
        self.position = loader.state()  # before the step that is sampled

    def begin(self, step: int, clock: Clock) -> None:
        if self.pending is None:
            self._sample(step)
            clock.lap("sync")

    def next(self, step: int, stopping: Stopping, clock: Clock) -> list[Episode]:
        assert self.pending is not None
        pending, position, self.pending = self.pending, self.position, None
        episodes = self.workers.episodes(pending)
        require_sampled(episodes, step)
        clock.lap("generate")
        if self.ahead:  # the next episodes are sampled while this step trains
            self._sample(step + 1)
            clock.lap("sync")
        try:
            self.score(episodes, step, stopping)
        except Stopped:
            self.position = position
            raise
        clock.lap("reward")
        return episodes

    def _sample(self, step: int) -> None:
        self.position = self.loader.state()
        if step <= self.config.trainer.steps:
            self.workers.sync()
            self.pending = self.workers.engines.start(self.loader.next(), self.config.algorithm.group_size, seed_of(self.config, step))

    def metrics(self) -> dict[str, float]:
        return {}

    def state(self) -> dict[str, Any]:
        return self.position

    def load(self, state: dict[str, Any]) -> None:
        self.loader.load(state)
        self.position = self.loader.state()

    def close(self) -> None:
        pass


def seed_of(config: PpoConfig, step: int) -> int:
    """Of a step's samples; rollout engines add their number, so steps are far apart."""
    return (config.run.seed << 32) + (step << 12)
