"""Which trial runs next, and how far: pure functions of what trials have shown."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from sweeps.objective import Metric
from sweeps.plan import Plan
from sweeps.space import Point

State = Literal["open", "done", "pruned", "failed"]
Promotable = Callable[[float, Sequence[float], Metric, int], bool]  # a value, those of its rung with it, and the factor


@dataclass(frozen=True)
class Trial:
    number: int
    point: Point
    state: State = "open"
    values: Mapping[int, float] = field(default_factory=dict)  # by the rungs that it has reached
    target: int | None = None  # the step that it is on its way to; None where it waits at a rung
    seconds: float = 0.0  # that its jobs have run
    legs: int = 0
    attempts: int = 0  # legs in a row that failed
    parent: int | None = None  # pbt: whose checkpoint it began with,
    since: int | None = None  # at which step,
    replaces: int | None = None  # in whose place
    error: str | None = None

    @property
    def reached(self) -> int:
        return max(self.values, default=0)


@dataclass(frozen=True)
class Leg:
    number: int
    to: int
    why: str


def next_leg(plan: Plan, trials: Sequence[Trial], promotable: Promotable) -> Leg | Literal["new"] | None:
    """What to start now. None: nothing, until a trial that runs has reached its rung; then, where none runs, the sweep is over.

    Asynchronous successive halving, breadth first: a trial that waits costs nothing, so lower rungs fill before others go on from higher
    ones. Nothing waits for a whole rung: a free place goes to the best of those that are there, once they are `factor` times as many.
    """
    if len(trials) < plan.trials:
        return "new"
    for low, high in zip(plan.rungs, plan.rungs[1:], strict=False):
        there = at_rung(trials, low, plan.metric)
        waiting = [trial for trial in trials if trial.state == "open" and trial.target is None and trial.reached == low]
        for trial in sorted(waiting, key=lambda trial: plan.metric.order(trial.values[low])):
            value = trial.values[low]
            if not math.isnan(value) and promotable(value, there, plan.metric, plan.factor):
                place = 1 + sum(plan.metric.order(other) < plan.metric.order(value) for other in there)
                equal = sum(trial.values[low] == value for trial in trials if low in trial.values and _gone_on(trial, low))
                if place + equal > len(there) // plan.factor:  # of equal ones, no more than their share
                    continue
                return Leg(trial.number, high, f"number {place} of {len(there)} at step {low}")
    return _to_the_end(plan, trials)


def _to_the_end(plan: Plan, trials: Sequence[Trial]) -> Leg | None:
    """Of few trials none may be one of `factor`: the best of those that came furthest goes on all the same, so that one has all steps."""
    waiting = [trial for trial in trials if trial.state == "open" and not math.isnan(trial.values.get(trial.reached, math.nan))]
    if any(trial.target is not None or trial.state == "done" for trial in trials if trial.state != "failed") or not waiting:
        return None
    low = max(trial.reached for trial in waiting)
    if low == plan.steps:
        return None
    first = min((trial for trial in waiting if trial.reached == low), key=lambda trial: plan.metric.order(trial.values[low]))
    return Leg(first.number, next(rung for rung in plan.rungs if rung > low), f"the best of those at step {low}")


def at_rung(trials: Sequence[Trial], rung: int, metric: Metric) -> list[float]:
    """The values of a rung; of trials that failed on their way to it, or have no number there, the worst."""
    failed = [trial for trial in trials if trial.state == "failed" and trial.target == rung]
    values = [trial.values[rung] for trial in trials if rung in trial.values]
    return [*(metric.worst if math.isnan(value) else value for value in values), *(metric.worst for _ in failed)]


def _gone_on(trial: Trial, rung: int) -> bool:
    return trial.reached > rung or (trial.reached == rung and trial.target is not None)
