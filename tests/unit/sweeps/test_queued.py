"""Trials as jobs of a queue that is played."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster_tasks.node.job_queue.keeper import Rules
from cluster_tasks.node.job_queue.service import shown, submitted
from lab.played_queue import PlayedQueue
from sweeps.cluster import OWN
from sweeps.jobs import Job, Status
from sweeps.queued import Queued, url

COMMAND = ("-m", "trainer.train_ppo", "--config", "trainer/recipes/demo.yaml")
ENV = {OWN: json.dumps({"runtime_env": {"working_dir": "gcs://p.zip"}, "metadata": {"owner": "ada"}})}


class Front:
    """Ray's client, on a keeper in place of a socket."""

    def __init__(self, queue: PlayedQueue) -> None:
        self.played = queue
        self.folders: list[str] = []

    def submit_job(self, runtime_env: dict[str, Any], **given: Any) -> None:
        self.folders.append(runtime_env["working_dir"])
        self.played.ray.work[given["submission_id"]] = 600.0
        self.played.keeper.submit(submitted(given, ""))

    def _do_request(self, method: str, path: str, json_data: Any = None) -> Any:
        keeper, name = self.played.keeper, path.rpartition("/")[2]
        if method == "POST":
            keeper.hold(name, *(("held", "by hand") if json_data["do"] == "hold" else ("cancelled", "by hand")))
        known = {"jobs": [shown(each) for each in keeper.records.values()]} if path == "/queue" else shown(keeper.known(name))
        return SimpleNamespace(status_code=200, json=lambda: known)

    def get_job_logs(self, name: str) -> str:
        return f"what {name} said\n"


def test_a_trial_waits_makes_room_and_its_leg_ends_at_a_rung(tmp_path: Path) -> None:
    played = PlayedQueue.made(tmp_path / "q", 0, Rules(min_run=60), cpus=2)
    front = Front(played)
    jobs = Queued(front, front, ENV)
    for name in ("s-0.1", "s-1.1"):
        jobs.submit(Job(name, "s-0", COMMAND, tmp_path / name))
    played.play(90)
    assert front.folders == [".", "."]
    assert [each.job.owner for each in played.keeper.records.values()] == ["ada", "ada"]
    assert jobs.jobs() == {"s-0.1": Status("running"), "s-1.1": Status("waiting")}
    jobs.cancel("s-1.1")
    played.ray.work["urgent"] = 100.0
    own = {"sizes": [{"cpus": 2}], "priority": 90}
    played.keeper.submit(submitted({"entrypoint": "python x.py", "submission_id": "urgent", "metadata": {"queue": json.dumps(own)}}, ""))
    played.play(60)
    assert jobs.jobs()["s-0.1"] == Status("waiting")  # it comes back by itself
    played.play(200)
    assert jobs.jobs()["s-0.1"] == Status("running")
    jobs.hold("s-0.1")
    played.play(60)
    assert jobs.jobs()["s-0.1"] == Status("paused", 143)
    assert jobs.jobs()["s-0.1"] == Status("paused", 143)  # also once the queue has forgotten it
    assert played.state("s-0.1") == "cancelled"
    assert (tmp_path / "s-0.1").read_text() == "what s-0.1.2 said\n"


def test_a_trial_that_the_trainer_refuses_is_refused_before_it_is_queued(tmp_path: Path) -> None:
    front = Front(PlayedQueue.made(tmp_path, 8))
    with pytest.raises(Exception, match=r"optim.lrr: unknown key"):
        Queued(front, front, ENV).submit(Job("s-0.1", "s-0", (*COMMAND, "optim.lrr=1"), tmp_path / "log"))


def test_where_the_queue_is(tmp_path: Path) -> None:
    env = {"FLOTILLA_ROUTES": str(tmp_path), "RAY_OVERRIDE_DASHBOARD_URL": "http://127.0.0.1:8265"}
    assert url(env) is url({}) is None
    (tmp_path / "queue").touch()
    assert url(env) == "http://127.0.0.1:8265/flotilla/at/queue"
