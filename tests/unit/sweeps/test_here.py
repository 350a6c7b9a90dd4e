"""Trials as processes of this shell."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.waiting import wait_for
from sweeps import here
from sweeps.here import VISIBLE, Here, places
from sweeps.jobs import Job, Status
from trainer.errors import ConfigError

SAVES = (  # a signal just before one long sleep would wait for its end
    "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); print('ready', flush=True)\n"
    "for _ in range(600): time.sleep(0.1)"
)


def job(folder: Path, name: str, code: str) -> Job:
    return Job(name, name, ("-c", code), folder / f"{name}.log", {"SWEEP": "s"})


def ended(jobs: Here, name: str) -> Status:
    wait_for(name, lambda: jobs.jobs()[name].code is not None, 30, every=0.02)
    return jobs.jobs()[name]


def test_what_became_of_a_process(tmp_path):
    jobs = Here()
    for name, code in (("a", "import os; print(os.environ['SWEEP'])"), ("b", "raise SystemExit(2)"), ("c", SAVES)):
        jobs.submit(job(tmp_path, name, code))
    assert (ended(jobs, "a"), ended(jobs, "b")) == (Status("succeeded", 0), Status("failed", 2))
    assert (tmp_path / "a.log").read_text() == "s\n"
    wait_for("c", (tmp_path / "c.log").read_text, 30, every=0.02)
    assert jobs.jobs()["c"] == Status("running")
    jobs.hold("c")
    assert ended(jobs, "c") == Status("paused", 143)


def test_those_that_run_save_when_the_driver_ends(tmp_path):
    jobs = Here()
    jobs.submit(job(tmp_path, "c", SAVES))
    wait_for("c", (tmp_path / "c.log").read_text, 30, every=0.02)
    jobs.close()
    assert jobs.jobs()["c"] == Status("paused", 143)


def test_trials_at_a_time_have_gpus_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(here, "own_ray_runs", lambda: False)
    assert places(2, 2, {VISIBLE: "4,5,6,7,8"}) == ["4,5", "6,7"]
    assert places(2, 0, {VISIBLE: "4"}) == places(1, 2, {}) == []
    jobs = Here(["4,5", "6,7"])
    show = f"import os; print(os.environ['{VISIBLE}'])"
    for name in "ab":
        jobs.submit(job(tmp_path, name, show))
    for name in "ab":
        ended(jobs, name)
    jobs.submit(job(tmp_path, "c", show))
    ended(jobs, "c")
    assert [(tmp_path / f"{name}.log").read_text() for name in "abc"] == ["4,5\n", "6,7\n", "4,5\n"]


def test_more_trials_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(here, "own_ray_runs", lambda: False)
    with pytest.raises(ConfigError, match="--parallel 3: 3 trials with 2 GPUs each need 6, and this machine has 4; at most 2 fit"):
        places(3, 1.5, {VISIBLE: "0,1,2,3"})
