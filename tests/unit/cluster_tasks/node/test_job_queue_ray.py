"""What the queue asks of Ray, of a dashboard that answers as Ray's does."""

from __future__ import annotations

import io
import urllib.error
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from cluster_tasks.node.dashboard import Dashboard
from cluster_tasks.node.job_queue.jobs import Job, Size
from cluster_tasks.node.job_queue.rayjobs import RayJobs
from cluster_tasks.node.job_queue.service import Refused, package

JOB = Job.of(
    {
        "name": "a",
        "command": "python -m trainer.train_ppo",
        "owner": "ann",
        "sizes": [{"gpus": 4, "cpus": 2, "settings": ["placement.ranks=4"]}],
        "runtime_env": {"working_dir": "gcs://_ray_pkg_1.zip", "py_modules": ["gcs://_ray_pkg_2.zip", "s3://b/c.zip"]},
    }
)


class Played(Dashboard):
    def __init__(self, **answers: Any) -> None:
        super().__init__("http://127.0.0.1:1", None)
        object.__setattr__(self, "answers", answers)
        object.__setattr__(self, "asked", [])

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        self.asked.append((path, body))  # type: ignore[attr-defined]
        answer = self.answers["post" if body else path.partition("?")[0].rpartition("/")[2] or "jobs"]  # type: ignore[attr-defined]
        if isinstance(answer, Exception):
            raise answer
        return answer


def error(code: int, text: str) -> urllib.error.HTTPError:
    return urllib.error.HTTPError("u", code, "no", Message(), io.BytesIO(text.encode()))


def nodes(*found: dict[str, Any]) -> dict[str, Any]:
    return {"data": {"result": {"result": list(found)}}}


def test_elastic_and_lost_nodes_are_not_counted_and_shells_are_seen() -> None:
    gpus = {"resources_total": {"GPU": 8.0, "CPU": 64.0}}
    known = nodes(
        {"state": "ALIVE", "labels": {}} | gpus,
        {"state": "ALIVE", "labels": None, "resources_total": {"CPU": 16.0}},
        {"state": "DEAD", "labels": {}} | gpus,
        {"state": "ALIVE", "labels": {"flotilla.fleet": "spot"}} | gpus,
    )
    usage = {"data": {"clusterStatus": {"loadMetricsReport": {"usage": {"GPU": [6.0, 16.0], "CPU": [3.0, 144.0]}}}}}
    listed = [{"submission_id": "a.1", "status": "RUNNING"}, {"submission_id": None, "status": "RUNNING"}]
    seen = RayJobs(Played(nodes=known, jobs=listed, cluster_status=usage)).look()
    assert (seen.nodes, seen.gpus, seen.cpus, seen.used_gpus, seen.used_cpus, seen.drivers) == (2, 8.0, 80.0, 6.0, 3.0, True)
    assert [*seen.jobs] == ["a.1"]


def test_a_cluster_that_starts_answers_with_less() -> None:
    with pytest.raises(OSError, match="the list of nodes has no 'data'"):
        RayJobs(Played(nodes={"result": False})).look()
    seen = RayJobs(Played(nodes=nodes(), jobs=[], cluster_status={"data": {"clusterStatus": None}})).look()
    assert (seen.used_gpus, seen.drivers) == (0.0, False)


def test_a_submission_is_made_once_and_a_refusal_is_rays_last_line() -> None:
    dashboard = Played(post={})
    RayJobs(dashboard).start("a.1", JOB, JOB.sizes[0])
    [(path, body)] = dashboard.asked  # type: ignore[attr-defined]
    assert path == "/api/jobs/"
    assert body["entrypoint"] == "python -m trainer.train_ppo 'placement.ranks=4'"
    assert (body["submission_id"], body["metadata"]) == ("a.1", {"queued_as": "a"})
    RayJobs(Played(post=error(500, "x"), **{"a.1": {"status": "RUNNING"}})).start("a.1", JOB, JOB.sizes[0])  # an earlier try arrived
    refuses = Played(post=error(400, "Traceback\nValueError: no such thing\n"), **{"a.1": error(404, "")})
    with pytest.raises(OSError, match=r"Ray does not take a\.1: ValueError: no such thing"):
        RayJobs(refuses).start("a.1", JOB, Size(1, 1))


def test_packages_are_rays_and_stay_in_their_folder() -> None:
    assert JOB.packages() == {"_ray_pkg_1.zip", "_ray_pkg_2.zip"}
    assert package("/api/packages/gcs/_ray_pkg_0a.zip") == "_ray_pkg_0a.zip"
    for path in ("/api/packages/gcs/../queue.sqlite", "/api/packages/gcs/.x", "/api/packages/s3/_ray_pkg_0a.zip", "/queue"):
        assert package(path) is None
    assert Refused(404, "x").code == 404


def test_a_package_that_is_gone_is_said(tmp_path: Path) -> None:
    class Missing(Played):
        def read(self, path: str, body: dict[str, Any] | None = None, seconds: float = 1) -> bytes:
            raise error(404, "")

    with pytest.raises(FileNotFoundError):
        RayJobs(Missing()).upload(tmp_path / "_ray_pkg_1.zip")
