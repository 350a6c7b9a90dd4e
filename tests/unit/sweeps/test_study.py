"""The points that are drawn, and what a driver that is started again finds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sweeps.objective import Metric
from sweeps.plan import Plan
from sweeps.space import Choice, Point, Range
from sweeps.study import Study, promotable

SPACE = (
    Range("optim.lr", 1e-6, 1e-3, log=True),
    Range("trainer.prompts_per_step", 8, 32, step=8, whole=True),
    Choice("a.b", ("x", "[1, 2]")),
)
PLAN = Plan("s", "ppo", ("run.yaml",), (), SPACE, "random", "none", Metric("reward", "max"), (6,), 3, trials=8)


def study(folder: Path, plan: Plan = PLAN, refused: Callable[[Point], str | None] = lambda _: None) -> Study:
    return Study(plan, folder / "study.db", refused)


def drawn(found: Study, count: int) -> list[Point]:
    return [trial.point for _ in range(count) if (trial := found.new())]


@pytest.mark.parametrize("search", ["random", "tpe"])
def test_a_driver_that_is_started_again_draws_what_it_would_have_drawn(tmp_path, search):
    plan = replace(PLAN, search=search)
    (tmp_path / "again").mkdir()
    whole = drawn(study(tmp_path, plan), 4)
    again = [point for _ in range(4) for point in drawn(study(tmp_path / "again", plan), 1)]
    assert whole == again
    assert len({point["optim.lr"] for point in whole}) == 4
    for point in whole:
        assert 1e-6 <= float(point["optim.lr"]) <= 1e-3
        assert point["trainer.prompts_per_step"] in ("8", "16", "24", "32") and point["a.b"] in ("x", "[1, 2]")


def test_a_point_that_was_not_whole_when_the_driver_was_killed_is_drawn_again(tmp_path):
    first = study(tmp_path)
    whole = drawn(first, 1)
    asked = first._ask()  # and no more
    assert [trial.point for trial in study(tmp_path).trials()] == whole
    again = study(tmp_path).new()
    assert again and again.number == asked.number and float(again.point["optim.lr"]) == asked.params["optim.lr"]


def test_refused_points_and_those_that_were_there_are_no_trials(tmp_path):
    plan = replace(PLAN, space=(Choice("a.b", ("x", "y", "z")),))
    found = study(tmp_path, plan, lambda point: "no" if point["a.b"] == "y" else None)
    assert sorted(point["a.b"] for point in drawn(found, 5)) == ["x", "z"]
    assert found.new() is None and [trial.point["a.b"] for trial in found.trials() if trial.state == "open"] != []


def test_a_grid_is_tried_in_order(tmp_path):
    plan = replace(PLAN, search="grid", space=SPACE[1:])
    points = [(str(count), text) for count in (8, 16, 24, 32) for text in ("x", "[1, 2]")]
    assert [tuple(point.values()) for point in drawn(study(tmp_path, plan), 9)] == points


def test_what_was_reported_is_there_for_the_next_driver(tmp_path):
    first = study(tmp_path)
    drawn(first, 3)
    first.set(0, target=6, seconds=3.5, legs=1)
    first.report(1, 2, 0.5)
    first.end(2, "pruned")
    first.end(1, "done", 0.75)
    now = {trial.number: trial for trial in study(tmp_path).trials()}
    assert (now[0].target, now[0].seconds, now[0].legs, now[0].state) == (6, 3.5, 1, "open")
    assert (now[1].values, now[1].target, now[1].state) == ({2: 0.5}, None, "done")
    assert now[2].state == "pruned"


@pytest.mark.parametrize(
    ("value", "there", "goal", "found"),
    [
        (0.3, [0.1, 0.3, 0.2], "max", True),
        (0.2, [0.1, 0.3, 0.2], "max", False),
        (0.1, [0.1, 0.3, 0.2], "min", True),
        (0.3, [0.1, 0.3], "max", False),  # too few to be one of three
        (0.2, [0.1, 0.3, 0.2, -math.inf, -math.inf, -math.inf], "max", True),
    ],
)
def test_one_of_three_goes_on(value, there, goal, found):
    assert promotable(value, there, Metric("reward", goal), 3) is found
