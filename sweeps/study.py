"""Optuna: what chooses the points of trials, what says which go on, and the SQLite file that a sweep resumes from.

Optuna's trials are told what happened one fact at a time, and a fact is there or is not: after a kill, what is missing is found in the
trial's run folder (loop.py). https://optuna.readthedocs.io/en/stable/reference/
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

try:
    import optuna
except ModuleNotFoundError as error:
    from trainer.errors import ConfigError

    raise ConfigError("optuna is not installed in this environment; pip install 'optuna==5.0.0', or make install") from error

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState

from sweeps.decisions import State, Trial
from sweeps.objective import Metric
from sweeps.plan import Plan
from sweeps.space import Choice, Parameter, Point, points

optuna.logging.set_verbosity(optuna.logging.ERROR)
STATES: dict[TrialState, State] = {
    TrialState.RUNNING: "open",
    TrialState.COMPLETE: "done",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}
TRIES = 200  # points in a row that are refused or were there before


class Study:
    """One process at a time has it. `refused` says why a point is none, or None."""

    def __init__(self, plan: Plan, file: Path, refused: Callable[[Point], str | None]) -> None:
        self.plan, self.refused = plan, refused
        goal = "maximize" if plan.metric.goal == "max" else "minimize"
        self.study = optuna.create_study(
            storage=f"sqlite:///{file.resolve()}",
            study_name=plan.name,
            direction=goal,
            load_if_exists=True,
            pruner=optuna.pruners.NopPruner(),
        )
        self.distributions = {each.key: distribution(each) for each in plan.space}
        self.known: dict[int, optuna.Trial] = {}

    def trials(self) -> list[Trial]:
        """Those that have a point, in order. Points that were refused are none."""
        return [as_trial(trial) for trial in self.study.get_trials(deepcopy=False) if "point" in trial.user_attrs]

    def new(self) -> Trial | None:
        """The next trial, of a point that none has yet; None where there is no other."""
        tried = [trial.point for trial in self.trials() if trial.parent is None]
        if self.plan.search == "grid":
            wanted = next((point for point in points(self.plan.space) if point not in tried and not self.refused(point)), None)
            return self.add(wanted) if wanted else None
        if self._none_left(tried):
            return None
        for _ in range(TRIES):
            asked = self._unfinished() or self._ask()
            point = self._point(asked.params)
            why = self.refused(point) or ("there before" if point in tried else None)
            if why is None:
                asked.set_user_attr("point", point)
                return self.trial(asked.number)
            self.study.tell(asked, state=TrialState.FAIL)
        return None

    def _none_left(self, tried: Sequence[Point]) -> bool:
        """Whether every point of a small space was tried or is refused; drawing until TRIES are over would say the same later."""
        sizes = [len(each.texts) if isinstance(each, Choice) else math.inf for each in self.plan.space]
        return math.prod(sizes) <= TRIES and all(point in tried or self.refused(point) for point in points(self.plan.space))

    def _unfinished(self) -> optuna.Trial | None:
        """Of a driver that was killed before the point was whole: it is drawn again, to the same values."""
        for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if "point" not in trial.user_attrs:
                self.study.sampler = sampler(self.plan, trial.number)
                return self._drawn(optuna.Trial(self.study, trial._trial_id))
        return None

    def _ask(self) -> optuna.Trial:
        self.study.sampler = sampler(self.plan, len(self.study.get_trials(deepcopy=False)))
        return self._drawn(self.study.ask())

    def _drawn(self, trial: optuna.Trial) -> optuna.Trial:
        for each in self.plan.space:
            suggest(trial, each)
        return trial

    def add(self, point: Point, values: Mapping[int, float] | None = None, **attributes: Any) -> Trial:
        """A trial of a point that nobody has to choose, at once; with the values of rungs that another has reached for it."""
        params = {each.key: self._param(each, point[each.key]) for each in self.plan.space}
        self.study.add_trial(
            optuna.create_trial(
                state=TrialState.RUNNING,
                params=params,
                distributions=self.distributions,
                user_attrs={"point": point, **attributes},
                intermediate_values=dict(values or {}),
            )
        )
        return self.trials()[-1]

    def _param(self, parameter: Parameter, text: str) -> Any:
        return text if isinstance(parameter, Choice) else int(text) if parameter.whole else float(text)

    def _point(self, params: dict[str, Any]) -> Point:
        return {each.key: params[each.key] if isinstance(each, Choice) else each.text(params[each.key]) for each in self.plan.space}

    def trial(self, number: int) -> Trial:
        return next(trial for trial in self.trials() if trial.number == number)

    def set(self, number: int, **attributes: Any) -> None:
        for name, value in attributes.items():
            self._trial(number).set_user_attr(name, value)

    def report(self, number: int, step: int, value: float) -> None:
        """A trial has reached a rung, where it waits."""
        self._trial(number).report(value, step)
        self.set(number, target=None, attempts=0)

    def end(self, number: int, state: State, value: float | None = None) -> None:
        """Optuna takes no NaN for a result: such a trial has failed."""
        optuna_state = next(known for known, ours in STATES.items() if ours == state)
        self.study.tell(self._trial(number), value if state == "done" else None, state=optuna_state)

    def _trial(self, number: int) -> optuna.Trial:
        if number not in self.known:
            found = next(trial for trial in self.study.get_trials(deepcopy=False) if trial.number == number)
            self.study.sampler = optuna.samplers.RandomSampler(0)  # nothing is drawn
            self.known[number] = optuna.Trial(self.study, found._trial_id)
        return self.known[number]


def as_trial(trial: optuna.trial.FrozenTrial) -> Trial:
    said = trial.user_attrs
    return Trial(
        trial.number,
        said["point"],
        STATES[trial.state],
        dict(sorted(trial.intermediate_values.items())),
        *(said.get("target"), said.get("seconds", 0.0), said.get("legs", 0), said.get("attempts", 0)),
        *(said.get("parent"), said.get("since"), said.get("replaces"), said.get("error")),
    )


def suggest(trial: optuna.Trial, parameter: Parameter) -> None:
    if isinstance(parameter, Choice):
        trial.suggest_categorical(parameter.key, parameter.texts)
    elif parameter.whole:
        step = round(parameter.step) if parameter.step else 1
        trial.suggest_int(parameter.key, round(parameter.low), round(parameter.high), step=step, log=parameter.log)
    else:
        trial.suggest_float(parameter.key, parameter.low, parameter.high, step=parameter.step, log=parameter.log)


def distribution(parameter: Parameter) -> BaseDistribution:
    if isinstance(parameter, Choice):
        return CategoricalDistribution(parameter.texts)
    if parameter.whole:
        step = round(parameter.step) if parameter.step else 1
        return IntDistribution(round(parameter.low), round(parameter.high), log=parameter.log, step=step)
    return FloatDistribution(parameter.low, parameter.high, log=parameter.log, step=parameter.step)


def sampler(plan: Plan, number: int) -> optuna.samplers.BaseSampler:
    """Each trial has a seed of its own, so that a driver that is started again draws what it would have drawn."""
    seed = random.Random(f"{plan.seed} {number}").randrange(2**32)
    if plan.search == "tpe":
        return optuna.samplers.TPESampler(seed=seed, n_startup_trials=min(10, max(3, plan.trials // 4)), multivariate=True)
    return optuna.samplers.RandomSampler(seed)


def promotable(value: float, there: Sequence[float], metric: Metric, factor: int) -> bool:
    """Whether a trial is among the best of its rung, one of `factor`: Optuna's successive halving, asked about this rung alone.

    Optuna's own trials cannot pause (its pruner decides once, when a trial arrives); ours can, so it is asked again as a rung fills.
    `there`: the values of the rung, with this one.
    """
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=factor, bootstrap_count=factor - 1)
    rung = optuna.create_study(direction="maximize" if metric.goal == "max" else "minimize", pruner=pruner)
    others = list(there)
    others.remove(value)
    for other in others:
        asked = rung.ask()
        asked.report(_finite(other), 1)
        asked.should_prune()
    asked = rung.ask()
    asked.report(value, 1)
    return not asked.should_prune()


def _finite(value: float) -> float:
    return math.copysign(1e300, value) if math.isinf(value) else value
