"""The driver, with trials that are played: they write what a run would, in no time."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from sweeps import loop
from sweeps.budget import Budget
from sweeps.jobs import Job, Status
from sweeps.loop import Driver
from sweeps.objective import Metric
from sweeps.plan import Plan
from sweeps.report import page, told
from sweeps.space import Choice
from sweeps.study import Study
from trainer.checkpoints.folders import Checkpoints
from trainer.cluster.stopping import Stopping
from trainer.errors import ConfigError

RATES = ("0.1", "0.2", "0.3")
PLAN = Plan("s", "ppo", ("run.yaml",), (), (Choice("optim.lr", RATES),), "grid", "asha", Metric("reward", "max"), (2, 6), 3, trials=3)


class Killed(BaseException):
    """What ends a driver at any place."""


class Played:
    """A job ends as soon as it is asked about; its reward is its learning rate."""

    def __init__(self, runs: Path, code: Callable[[Job], int] = lambda _: 0, reward: Callable[[float], float] = float) -> None:
        self.runs, self.code, self.reward = runs, code, reward
        self.submitted: list[Job] = []
        self.states: dict[str, Status] = {}
        self.held: list[str] = []

    def submit(self, job: Job) -> None:
        self.submitted.append(job)
        self.states[job.name] = Status("running")

    def jobs(self) -> dict[str, Status]:
        for job in self.submitted:
            if self.states[job.name].state == "running":
                self.states[job.name] = self.played(job)
        return self.states

    def played(self, job: Job) -> Status:
        words = dict(word.split("=", 1) for word in job.command if "=" in word)
        last = "run.pause_at" not in words
        if code := self.code(job):
            with job.log.open("a") as log:
                log.write(f"error: it ended with {code}\n")
            return Status("failed", code)
        train(self.runs / job.run, int(words.get("run.pause_at", PLAN.steps)), self.reward(float(words["optim.lr"])), last)
        return Status("succeeded", 0) if last else Status("paused", 143)

    def hold(self, name: str) -> None:
        self.held.append(name)

    def release(self, name: str) -> None: ...

    def cancel(self, name: str) -> None: ...

    def close(self) -> None: ...


def train(run: Path, to: int, reward: float, last: bool) -> None:
    """What a run leaves after a step."""
    run.mkdir(exist_ok=True)
    (run / "run.yaml").write_text(yaml.safe_dump({"run": {"name": run.name, "seed": 0}, "optim": {"lr": reward}}))
    value = None if math.isnan(reward) else reward
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": step, "reward": value}) + "\n" for step in range(1, to + 1)))
    with Checkpoints(run / "checkpoints").writing(to, {}):
        pass
    if last:
        (run / "model").mkdir(exist_ok=True)


@pytest.fixture
def runs(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("FLOTILLA_RUNS", str(tmp_path))
    (tmp_path / "s/logs").mkdir(parents=True)
    return tmp_path


def driver(runs: Path, jobs: Played, plan: Plan = PLAN, budget: Budget | None = None, retries: int = 1) -> Driver:
    return Driver(plan, runs / "s", Study(plan, runs / "s/study.db", lambda _: None), jobs, budget or Budget(), 1, retries)


def legs(jobs: Played) -> list[tuple[str, str]]:
    """The run of each leg, and where it pauses."""
    return [(job.run, next((word for word in job.command if word.startswith("run.pause_at=")), "")) for job in jobs.submitted]


def test_all_pause_at_the_rung_and_the_best_goes_on_to_the_end(runs, capsys):
    jobs = Played(runs)
    found = driver(runs, jobs)
    assert found.run(Stopping(), lambda _: None) == 0
    assert legs(jobs) == [*((f"s-000{i}", "run.pause_at=2") for i in range(3)), ("s-0002", "")]
    assert jobs.submitted[0].env == {"FLOTILLA_SWEEP": "s"}
    assert [trial.state for trial in found.study.trials()] == ["pruned", "pruned", "done"]
    found.conclude()
    assert yaml.safe_load((runs / "s/best.yaml").read_text()) == {"run": {"seed": 0}, "optim": {"lr": 0.3}}
    assert "best: s-0002, reward 0.3 at step 6: optim.lr=0.3" in capsys.readouterr().out


@pytest.mark.parametrize("at", range(1, 5))
def test_a_driver_that_is_killed_at_any_submission_loses_and_doubles_nothing(runs, at):
    jobs, count = Played(runs), 0

    def dies(job: Job) -> None:
        nonlocal count
        count += 1
        if count == at:
            raise Killed
        Played.submit(jobs, job)

    jobs.submit = dies  # type: ignore[method-assign]
    with pytest.raises(Killed):
        driver(runs, jobs).run(Stopping(), lambda _: None)
    again = Played(runs)
    assert driver(runs, again).run(Stopping(), lambda _: None) == 0
    assert sorted(legs(jobs) + legs(again)) == [
        ("s-0000", "run.pause_at=2"),
        ("s-0001", "run.pause_at=2"),
        ("s-0002", ""),
        ("s-0002", "run.pause_at=2"),
    ]


def test_a_leg_that_ended_after_its_driver_is_not_run_again(runs):
    first = driver(runs, Played(runs))
    first.study.new()
    first.study.set(0, target=2, legs=1)
    train(runs / "s-0000", 2, 0.1, last=False)
    jobs = Played(runs)
    assert driver(runs, jobs).run(Stopping(), lambda _: None) == 0
    assert legs(jobs)[0] == ("s-0001", "run.pause_at=2") and len(jobs.submitted) == 3


def test_a_trial_that_fails_is_started_again_then_counts_as_the_worst(runs, capsys):
    jobs = Played(runs, code=lambda job: 1 if job.run == "s-0002" else 0)
    found = driver(runs, jobs)
    assert found.run(Stopping(), lambda _: None) == 0
    assert [run for run, _ in legs(jobs)] == ["s-0000", "s-0001", "s-0002", "s-0002", "s-0001"]
    assert found.study.trials()[2].state == "failed"
    output = capsys.readouterr().out
    assert "s-0002 failed with exit code 1: it ended with 1; started again (1 of 1, --retries)" in output
    assert "s-0002 has failed, which counts as the worst: exit code 1: it ended with 1" in output
    found.conclude()
    assert "failed: s-0002" in capsys.readouterr().out


def test_a_mistake_in_settings_is_not_tried_twice(runs):
    jobs = Played(runs, code=lambda job: 2 if job.run == "s-0000" else 0)
    assert driver(runs, jobs).run(Stopping(), lambda _: None) == 0
    assert [run for run, _ in legs(jobs)].count("s-0000") == 1


def test_a_trial_without_a_number_counts_as_the_worst(runs, capsys):
    jobs = Played(runs, reward=lambda rate: math.nan if rate == 0.3 else rate)
    found = driver(runs, jobs)
    assert found.run(Stopping(), lambda _: None) == 0
    assert [trial.state for trial in found.study.trials()] == ["pruned", "done", "failed"]
    assert "s-0002 has failed, which counts as the worst: reward at step 2 is not a number" in capsys.readouterr().out


def test_a_metric_that_no_trial_has_ends_the_sweep_with_those_that_there_are(runs):
    with pytest.raises(ConfigError, match="--metric rewrad: s-0000 has none at step 2; it has reward"):
        driver(runs, Played(runs), replace(PLAN, metric=Metric("rewrad", "max"))).run(Stopping(), lambda _: None)


def test_nothing_starts_beyond_the_budget_and_more_of_it_goes_on(runs, capsys):
    plan = replace(PLAN, stop="none", rungs=(6,))
    first = driver(runs, Played(runs), plan, Budget(price=3600, usd=25))  # a USD a second
    first.study.new()
    train(runs / "s-0000", 6, 0.1, last=True)
    first.study.set(0, seconds=18.0)
    first.study.report(0, 6, 0.1)
    first.study.end(0, "done", 0.1)
    jobs = Played(runs)
    assert driver(runs, jobs, plan, Budget(price=3600, usd=25)).run(Stopping(), lambda _: None) == 3
    assert jobs.submitted == []
    assert "budget: 18.00 of 25 USD are spent, and the next 6 steps would take about 18.00 USD" in capsys.readouterr().out
    assert driver(runs, jobs, plan, Budget(price=3600, usd=60)).run(Stopping(), lambda _: None) == 0
    assert [run for run, _ in legs(jobs)] == ["s-0001", "s-0002"]


def test_a_leg_that_ended_while_the_driver_was_held_up_is_paid_for(runs, monkeypatch):
    """However late the driver looks: the seconds since its last look are the trial's."""
    clock = iter(range(0, 10_000, 40))  # seconds: each look is 40 after the one before
    monkeypatch.setattr(loop.time, "monotonic", lambda: float(next(clock)))
    jobs = Played(runs)
    given = driver(runs, jobs, budget=Budget(price=3600.0, usd=30.0))
    assert given.run(Stopping(), lambda _: None) == loop.NO_BUDGET
    assert len(jobs.submitted) == 1
    assert given.study.trial(0).seconds >= 40


def test_asked_to_stop_it_has_its_trials_save(runs):
    stopping = Stopping()
    jobs = Played(runs)
    jobs.jobs = lambda: {job.name: Status("paused", 143) if job.name in jobs.held else Status("running") for job in jobs.submitted}  # type: ignore[method-assign]

    def wait(_: float) -> None:
        stopping.signal = signal.SIGTERM

    found = driver(runs, jobs)
    assert found.run(stopping, wait) == 143
    assert jobs.held == ["s-0000.1"]
    assert [(trial.state, trial.target) for trial in found.study.trials()] == [("open", 2)], "it goes on from where it saved"


def test_a_trial_that_does_not_save_is_ended_by_force(runs, monkeypatch, capsys):
    monkeypatch.setattr(loop, "PAUSE_SECONDS", -1)
    stopping = Stopping()
    stopping.signal = signal.SIGTERM
    jobs = Played(runs)
    found = driver(runs, jobs)
    found.study.new()
    found.study.set(0, target=2, legs=1)
    jobs.states["s-0000.1"] = Status("running")
    jobs.cancel = lambda name: jobs.states.update({name: Status("failed", 137)})  # type: ignore[method-assign]
    assert found.run(stopping, lambda _: None) == 143
    assert "s-0000 has not saved within" in capsys.readouterr().out
    assert found.study.trials()[0].state == "open", "it is resumed from its last checkpoint"


def test_the_page_has_every_trial_with_its_curve_and_no_markup_of_a_stranger(runs):
    found = driver(runs, Played(runs))
    found.run(Stopping(), lambda _: None)
    trials = found.study.trials()
    sweep = told(PLAN, [replace(trials[0], error="<script>x</script>"), *trials[1:]], runs, Budget(price=1))
    assert [(trial["name"], trial["best"], trial["step"]) for trial in sweep["trials"]] == [
        ("s-0002", True, 6),
        ("s-0001", False, 2),
        ("s-0000", False, 2),
    ]
    assert sweep["steps"] == 10 and sweep["axes"] == [{"key": "optim.lr", "ticks": RATES, "log": False}]
    assert sweep["trials"][0]["curves"]["reward"]["value"] == [0.3] * 6
    text = page(sweep)
    assert "<script>x" not in text and "Content-Security-Policy" in text
