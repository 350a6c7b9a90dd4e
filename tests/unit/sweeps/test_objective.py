"""What trials are compared by, and what they may spend."""

from __future__ import annotations

import json
import math

import pytest
from support.configs import settings

from sweeps.budget import Budget
from sweeps.objective import Metric, default, parse, value_at


@pytest.mark.parametrize(
    ("text", "metric"),
    [
        ("eval_reward", Metric("eval_reward", "max")),
        ("eval_loss", Metric("eval_loss", "min")),
        ("reward:max:mean10", Metric("reward", "max", "mean10")),
        ("kl:min:best", Metric("kl", "min", "best")),
        ("eval_reward/math:last", Metric("eval_reward/math", "max")),
    ],
)
def test_a_metric_is_named_with_its_goal(text, metric):
    assert parse(text) == metric


def test_held_out_prompts_are_what_a_run_is_judged_by_where_it_has_some(tmp_path):
    assert default(settings(tmp_path)) == Metric("eval_reward", "max")
    assert default(settings(tmp_path, trainer={"eval_prompts": 0})) == Metric("reward", "max", "mean10")


@pytest.mark.parametrize(
    ("metric", "step", "value"),
    [
        (Metric("reward", "max"), 3, 3.0),
        (Metric("reward", "max", "best"), 4, 3.0),
        (Metric("reward", "min", "best"), 4, 1.0),
        (Metric("reward", "max", "mean2"), 3, 2.5),
        (Metric("reward", "max"), 4, math.nan),
        (Metric("reward", "max", "mean2"), 4, math.nan),
        (Metric("eval_reward", "max"), 1, None),  # before the first step it says nothing of a trial
        (Metric("eval_reward", "max"), 2, 0.5),
        (Metric("other", "max"), 4, None),
    ],
)
def test_the_value_at_a_step_is_of_the_steps_up_to_it(tmp_path, metric, step, value):
    rows = [{"step": 0, "eval_reward": 9}, {"step": 1, "reward": 1}, {"step": 2, "reward": 2, "eval_reward": 0.5}]
    rows += [{"step": 3, "reward": 3}, {"step": 4, "reward": None}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert value_at(tmp_path, step, metric) == pytest.approx(value, nan_ok=True)


def test_a_budget_is_crossed_in_whichever_unit_comes_first():
    assert not Budget(price=10, usd=5).crossed(1799)
    assert Budget(price=10, usd=5).crossed(1800)
    assert Budget(price=10, gpus=8, usd=5, gpu_hours=2).crossed(900)
    assert not Budget().crossed(1e9)
    assert Budget(price=10, gpus=8, usd=5, gpu_hours=2).shown(900) == "2.50 of 5 USD and 2.00 of 2 GPU hours are spent"
