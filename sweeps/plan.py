"""A sweep as data: what is searched, by what it is judged, and which steps its trials pause at."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from sweeps.objective import Metric
from sweeps.space import Parameter
from trainer.errors import ConfigError

GENERATIONS = 5  # of a population, without --rung
Search = Literal["grid", "random", "tpe"]
Stop = Literal["none", "asha", "pbt"]


@dataclass(frozen=True)
class Plan:
    name: str
    entry: str  # ppo, sft, rm, dpo
    files: tuple[str, ...]  # settings files, as they were named
    fixed: tuple[str, ...]  # key=value of every trial
    space: tuple[Parameter, ...]
    search: Search
    stop: Stop
    metric: Metric
    rungs: tuple[int, ...]  # steps at which trials are compared; the last are all steps
    factor: int  # asha: one of so many goes on to the next rung; pbt: one of so many is replaced
    trials: int
    seed: int = 0

    @property
    def steps(self) -> int:
        return self.rungs[-1]

    def run(self, number: int) -> str:
        """The trial's run.name."""
        return f"{self.name}-{number:04}"

    def identity(self) -> dict[str, Any]:
        """What may not differ where a sweep goes on, in words."""
        return {
            "settings file": list(self.files),
            "entry point": self.entry,
            "settings": list(self.fixed),
            "search space": [str(each) for each in self.space],
            "--search": self.search,
            "--stop": self.stop,
            "--metric": str(self.metric),
            "rungs": list(self.rungs),
            "--factor": self.factor,
            "--seed": self.seed,
        }

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def rungs(stop: Stop, steps: int, first: int | None, factor: int) -> tuple[int, ...]:
    """asha: the first, each the factor times the one before, and all steps. pbt: every `first` steps. Raises ConfigError."""
    if stop == "none":
        if first is not None:
            raise ConfigError(f"--rung {first}: trials run to their end; give --stop asha or pbt with it")
        return (steps,)
    if first is None:
        first = math.ceil(steps / (factor**2 if stop == "asha" else GENERATIONS))
    if not 1 <= first < steps:
        raise ConfigError(f"--rung {first}: must be at least 1 and below trainer.steps={steps}; or --stop none")
    if stop == "pbt":
        return (*range(first, steps, first), steps)
    found = [first]
    while found[-1] * factor < steps:
        found.append(found[-1] * factor)
    return (*found, steps)
