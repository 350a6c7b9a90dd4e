"""Rewards of a run in one process (placement.processes=one): computed where the loop is."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from trainer.cluster.stopping import Stopping
from trainer.configs.ppo import PpoConfig
from trainer.episodes import Episode, Prompt
from trainer.rewards import load, readings
from trainer.rewards.scorer import Scorer, deal, set_worth
from trainer.rewards.terms import Mistake, Scored
from trainer.rewards.worker import compute

ROWS_SAID = 3  # of the first prompts: how the reward reads their answers


class ScorerHere(Scorer):
    """Computes them in this process, where a breakpoint stops. One that hangs holds the run up: only an async one ends at its deadline."""

    def _start(self, rows: Sequence[Mapping[str, Any]] = ()) -> None:
        load(self.job.functions)
        print(*readings(self.job.functions, rows), sep="\n", end="\n" * bool(rows), flush=True)
        self.runner = asyncio.Runner()

    def close(self) -> None:
        self.runner.close()

    def _compute(self, episodes: list[Episode], step: int, stopping: Stopping | None) -> None:
        for part in deal(episodes, self.config.workers, whole_groups=self.reward.batched):
            answers = pickle.loads(pickle.dumps(self._answers(part, step)))  # theirs to change, as in a process
            compute(self.reward, answers, step, self.job, Here(part, self._fail), self.runner.run)


@dataclass
class Here:
    """A desk in this process."""

    episodes: list[Episode]
    failed: Callable[[list[Episode], Mistake], None]

    def mark(self, position: int, state: int) -> None:
        pass

    def end(self, position: int, outcome: Scored | Mistake) -> None:
        if isinstance(outcome, Mistake):
            self.failed([self.episodes[position]], outcome)
        else:
            set_worth(self.episodes[position], outcome)

    def fail(self, mistake: Mistake) -> None:
        self.failed(self.episodes, mistake)


def scorer_of(config: PpoConfig, prompts: Sequence[Prompt] = ()) -> AbstractContextManager[Scorer | None]:
    """None where an environment says what episodes are worth. How it reads the first prompts' is printed."""
    if config.environment.function:
        return nullcontext()
    return (ScorerHere if config.placement.processes == "one" else Scorer)(config.reward, [prompt.row for prompt in prompts[:ROWS_SAID]])
