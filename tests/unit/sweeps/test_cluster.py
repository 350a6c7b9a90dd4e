"""Trials as jobs of Ray, of a client that answers as Ray's does."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sweeps.cluster import OWN, SILENT_SECONDS, Cluster, is_job
from sweeps.jobs import Job, Status
from trainer.errors import ConfigError

ENV = {
    OWN: json.dumps(
        {"runtime_env": {"working_dir": "gcs://p.zip", "env_vars": {"A": "1"}}, "metadata": {"owner": "ada", "job_submission_id": "j"}}
    )
}


class Client:
    def __init__(self) -> None:
        self.submitted: list[dict[str, Any]] = []
        self.details: list[Any] = []
        self.stopped: list[str] = []

    def submit_job(self, **job: Any) -> None:
        self.submitted.append(job)

    def list_jobs(self) -> list[Any]:
        return self.details

    def get_job_logs(self, name: str) -> str:
        return f"error: what {name} said\n"

    def stop_job(self, name: str) -> None:
        self.stopped.append(name)


def test_a_trial_has_the_drivers_files_variables_and_owner(tmp_path: Path):
    client = Client()
    Cluster(client, ENV).submit(
        Job("s-0000.1", "s-0000", ("-m", "trainer.train_ppo", "optim.lr=1e-6", "a b"), tmp_path / "log", {"FLOTILLA_SWEEP": "s"})
    )
    [job] = client.submitted
    assert job["entrypoint"] == "python -m trainer.train_ppo optim.lr=1e-6 'a b'"
    assert job["runtime_env"] == {"working_dir": "gcs://p.zip", "env_vars": {"A": "1", "FLOTILLA_SWEEP": "s"}}
    assert (job["submission_id"], job["metadata"]) == ("s-0000.1", {"owner": "ada"})


@pytest.mark.parametrize(
    ("status", "code", "found"),
    [
        ("PENDING", None, Status("waiting")),
        ("RUNNING", None, Status("running")),
        ("SUCCEEDED", 0, Status("succeeded", 0)),
        ("STOPPED", None, Status("paused", 143)),
        ("FAILED", 143, Status("paused", 143)),  # it paused at its rung by itself
        ("FAILED", 2, Status("failed", 2)),
        ("FAILED", -9, Status("failed", 137)),
        ("FAILED", None, Status("failed", 1)),
    ],
)
def test_rays_words_for_what_became_of_a_job(status, code, found):
    client = Client()
    client.details = [SimpleNamespace(submission_id="a", status=status, driver_exit_code=code), SimpleNamespace(submission_id=None)]
    assert Cluster(client, ENV).jobs() == {"a": found}


def test_what_a_job_said_is_in_the_sweeps_log_once(tmp_path):
    client = Client()
    cluster = Cluster(client, ENV)
    cluster.submit(Job("a", "a", (), tmp_path / "log"))
    client.details = [SimpleNamespace(submission_id="a", status="FAILED", driver_exit_code=1)]
    for _ in range(2):
        cluster.jobs()
    assert (tmp_path / "log").read_text() == "error: what a said\n"


def test_a_cluster_that_does_not_answer_is_waited_for_within_a_deadline(monkeypatch):
    client = Client()
    client.details = [SimpleNamespace(submission_id="a", status="RUNNING", driver_exit_code=None)]
    cluster = Cluster(client, ENV)
    known = cluster.jobs()

    def silent() -> list[Any]:
        raise RuntimeError("Request failed with status code 502")

    monkeypatch.setattr(client, "list_jobs", silent)
    assert cluster.jobs() == known
    cluster.answered -= SILENT_SECONDS + 1
    with pytest.raises(ConfigError, match=r"has not answered for 300 s: Request failed with status code 502; the same command resumes"):
        cluster.jobs()


def test_a_driver_is_a_job_where_ray_says_so():
    assert is_job(ENV) and not is_job({})
