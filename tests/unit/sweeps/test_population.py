"""Who takes whose place, with which settings, and what is copied."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from sweeps.decisions import Leg, Trial
from sweeps.objective import Metric
from sweeps.plan import Plan
from sweeps.population import Exploit, copy, next_of, perturbed, require_changeable
from sweeps.space import Choice, Range, parameter
from trainer.configs.ppo import PpoConfig
from trainer.errors import ConfigError

SPACE = (Range("optim.lr", 1e-4, 1e-1, log=True), Choice("algorithm.clip_high", ("0.2", "0.25", "0.3")))
PLAN = Plan("p", "ppo", ("run.yaml",), (), SPACE, "random", "pbt", Metric("reward", "max"), (2, 4, 6), 4, trials=4)
POINT = {"optim.lr": "0.001", "algorithm.clip_high": "0.25"}


def at(rung: int, *values: float, **more: Any) -> list[Trial]:
    return [Trial(i, POINT, values={rung: value}, **more) for i, value in enumerate(values)]


def test_nobody_goes_on_before_all_are_there_and_the_worst_is_replaced_first():
    trials = at(2, 0.1, 0.4, 0.2, 0.3)
    assert next_of(PLAN, trials[:3]) == "new"
    assert next_of(PLAN, [*trials[:3], Trial(3, POINT, target=2)]) is None
    assert next_of(PLAN, trials) == Exploit(loser=0, parent=1, rung=2)


def test_after_a_place_was_taken_all_go_on():
    loser, *others = at(2, 0.1, 0.4, 0.2, 0.3)
    child = Trial(4, POINT, values={2: 0.4}, parent=1, since=2, replaces=0)
    trials = [replace(loser, state="pruned"), *others, child]
    assert next_of(PLAN, trials) == Leg(1, 4, "4 trials at step 2")
    trials[1] = replace(others[0], target=4)
    assert next_of(PLAN, trials) == Leg(2, 4, "4 trials at step 2")


def test_a_failed_trial_is_replaced_before_the_worst_one():
    trials = [*at(2, 0.1, 0.4, 0.2), Trial(3, POINT, state="failed", target=2)]
    assert next_of(PLAN, trials) == Exploit(loser=3, parent=1, rung=2)


def test_at_the_last_step_it_is_over():
    assert next_of(PLAN, at(6, 0.1, 0.4, 0.2, 0.3, state="done")) is None


def test_settings_move_a_little_within_the_space_and_the_same_way_each_time():
    exploit = Exploit(0, 1, 2)
    found = perturbed(PLAN, POINT, exploit, lambda _: None)
    assert found == perturbed(PLAN, POINT, exploit, lambda _: None) != POINT
    assert float(found["optim.lr"]) in (pytest.approx(0.0008), pytest.approx(0.00125))
    assert found["algorithm.clip_high"] in ("0.2", "0.25", "0.3")
    for loser in range(20):
        edge = perturbed(PLAN, POINT | {"optim.lr": "0.1"}, Exploit(loser, 1, 2), lambda _: None)
        assert float(edge["optim.lr"]) <= 0.1
    assert perturbed(PLAN, POINT, exploit, lambda _: "no") == POINT


def test_what_a_resumed_run_may_not_change_is_refused():
    require_changeable(SPACE)
    for word, why in (
        ("model.path=[gpt2,gpt3]", "the checkpoint's weights are of the other model"),
        ("run.seed=1..9", "the checkpoint's position"),
    ):
        found = parameter(PpoConfig, word)
        assert found
        with pytest.raises(ConfigError, match=rf"--stop pbt: {found.key} cannot change between rungs: {why}"):
            require_changeable([found])


def test_a_copy_is_the_parent_up_to_the_rung_under_another_name(tmp_path: Path):
    parent, child = tmp_path / "p-0001", tmp_path / "p-0004"
    for step in (2, 4):
        (parent / f"checkpoints/step_{step}").mkdir(parents=True)
        (parent / f"checkpoints/step_{step}/manifest.json").write_text(str(step))
    (parent / "run.yaml").write_text(yaml.safe_dump({"run": {"name": "p-0001", "seed": 3}, "optim": {"lr": 0.1}}))
    (parent / "metrics.jsonl").write_text("".join(json.dumps({"step": step, "reward": step}) + "\n" for step in range(1, 5)))
    copy(parent, child, 2)
    copy(parent, child, 2)  # of a driver that was killed just after
    assert [path.name for path in (child / "checkpoints").iterdir()] == ["step_2"]
    assert [json.loads(line)["step"] for line in (child / "metrics.jsonl").read_text().splitlines()] == [1, 2]
    assert yaml.safe_load((child / "run.yaml").read_text()) == {"run": {"name": "p-0004", "seed": 3}, "optim": {"lr": 0.1}}
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
