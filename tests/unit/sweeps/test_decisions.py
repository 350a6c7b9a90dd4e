"""Which trial runs next: successive halving by Optuna, asked again as rungs fill."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sweeps.decisions import Leg, Trial, at_rung, next_leg
from sweeps.objective import Metric
from sweeps.plan import Plan, rungs
from sweeps.space import Choice
from sweeps.study import promotable
from trainer.errors import ConfigError

METRIC = Metric("eval_reward", "max")


def plan(**changes: Any) -> Plan:
    settings: dict[str, Any] = {"metric": METRIC, "rungs": (2, 6, 18), "factor": 3, "trials": 9, "stop": "asha", "search": "grid"}
    return Plan(name="s", entry="ppo", files=("run.yaml",), fixed=(), space=(Choice("optim.lr", ("1", "2")),), **settings | changes)


def at(*values: float, rung: int = 2, first: int = 0) -> list[Trial]:
    return [Trial(first + i, {}, values={rung: value}) for i, value in enumerate(values)]


def test_new_trials_start_before_others_go_on():
    assert next_leg(plan(), at(0.1, 0.3, 0.2), promotable) == "new"


def test_of_three_at_a_rung_the_best_goes_on():
    coming = Trial(2, {}, target=2)
    assert next_leg(plan(trials=3), [*at(0.1, 0.3), coming], promotable) is None
    assert next_leg(plan(trials=3), at(0.1, 0.3, 0.2), promotable) == Leg(1, 6, "number 1 of 3 at step 2")


def test_a_paused_trial_is_promoted_later_when_its_rung_has_filled():
    trials = at(0.5, 0.4, 0.1, 0.2, 0.3)
    trials[0] = Trial(0, {}, values={2: 0.5}, target=6)
    coming = Trial(5, {}, target=2)
    assert next_leg(plan(trials=6), [*trials, coming], promotable) is None
    assert next_leg(plan(trials=6), [*trials, *at(0.0, first=5)], promotable) == Leg(1, 6, "number 2 of 6 at step 2")


def test_lower_rungs_come_first():
    above = [Trial(i, {}, values={2: 1.0, 6: value}) for i, value in enumerate((0.7, 0.9, 0.8))]
    assert next_leg(plan(trials=6), [*above, *at(*[0.1] * 3, first=3)], promotable) == Leg(1, 18, "number 1 of 3 at step 6")
    assert next_leg(plan(trials=12), [*above, *at(*[0.1] * 9, first=3)], promotable) == Leg(3, 6, "number 4 of 12 at step 2")


def test_of_equal_values_no_more_than_their_share_goes_on():
    trials = at(*[0.0] * 3)
    trials[0] = Trial(0, {}, values={2: 0.0}, target=6)
    assert next_leg(plan(trials=3), trials, promotable) is None


def test_one_trial_reaches_the_end_however_few_there_are():
    assert next_leg(plan(trials=2), at(0.1, 0.3), promotable) == Leg(1, 6, "the best of those at step 2")
    beyond = [Trial(0, {}, values={2: 0.1}), Trial(1, {}, values={2: 0.3, 6: 0.2})]
    assert next_leg(plan(trials=2), beyond, promotable) == Leg(1, 18, "the best of those at step 6")
    done = Trial(1, {}, state="done", values={2: 0.3, 6: 0.2, 18: 0.1})
    assert next_leg(plan(trials=2), [beyond[0], done], promotable) is None


def test_a_smaller_loss_is_better():
    assert next_leg(plan(trials=3, metric=Metric("loss", "min")), at(0.3, 0.1, 0.2), promotable) == Leg(1, 6, "number 1 of 3 at step 2")


def test_failed_trials_and_those_without_a_number_count_as_the_worst():
    failed = Trial(2, {}, state="failed", target=2)
    nan = Trial(3, {}, state="failed", values={2: math.nan})
    assert sorted(at_rung([*at(0.1), failed, nan], 2, METRIC)) == [-math.inf, -math.inf, 0.1]
    assert next_leg(plan(trials=3), [*at(0.1, 0.2), failed], promotable) == Leg(1, 6, "number 1 of 3 at step 2")


def test_a_whole_sweep_costs_a_quarter_of_its_grid():
    trials: dict[int, Trial] = {}
    steps = 0
    while (leg := next_leg(plan(trials=12, rungs=(2, 6, 18)), [*trials.values()], promotable)) is not None:
        if leg == "new":
            leg = Leg(len(trials), 2, "")
        before = trials.get(leg.number, Trial(leg.number, {}))
        steps += leg.to - before.reached
        trials[leg.number] = Trial(leg.number, {}, values={**before.values, leg.to: leg.number / 12})
    assert trials[11].reached == 18, "the best one reaches the end"
    assert steps / (12 * 18) < 0.4


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (("asha", 60, None, 3), (7, 21, 60)),
        (("asha", 60, 5, 3), (5, 15, 45, 60)),
        (("asha", 8, 2, 2), (2, 4, 8)),
        (("none", 60, None, 3), (60,)),
    ],
)
def test_rungs(asked, found):
    assert rungs(*asked) == found


@pytest.mark.parametrize(("asked", "line"), [(("asha", 6, 6, 3), "--rung 6: must be"), (("none", 6, 2, 3), "--rung 2: trials run to")])
def test_rungs_that_are_none(asked, line):
    with pytest.raises(ConfigError, match=line):
        rungs(*asked)
