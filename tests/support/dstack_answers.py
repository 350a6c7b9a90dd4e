"""What a dstack server and Ray's dashboard answer, over their HTTP APIs, from values that a test may change while they are asked."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from dstack.api import Client
from dstack.api.server import APIClient
from support import json_server

BEGIN = "2026-01-01T00:00:00+00:00"


@dataclass
class Answers:
    """Of one project, `main`."""

    url: str = ""
    run: Any = None  # the run that there is, or a list of them, of which all but the last are given once
    fleets: list[dict[str, Any]] = field(default_factory=list)
    refusals: list[int] = field(default_factory=list)  # statuses of the next answers; 0 hangs up
    pages: dict[str, Any] = field(default_factory=dict)  # of Ray's dashboard, on the same port

    @property
    def client(self) -> Client:
        return Client(api_client=APIClient(self.url, "token"), project_name="main")


def job(rank: int, status: str = "running", **submission: Any) -> dict[str, Any]:
    """One node of a run."""
    spec = {
        "job_num": rank,
        "job_name": f"ray-{rank}-0",
        "commands": [],
        "env": {},
        "image_name": "ray:1",
        "requirements": {"resources": {}},
    }
    spec |= {"home_dir": "/root", "max_duration": None, "retry": None, "working_dir": None}
    known = {"id": str(uuid.uuid4()), "submission_num": 0, "submitted_at": BEGIN, "last_processed_at": BEGIN, "status": status}
    return {"job_spec": spec, "job_submissions": [known | submission]}


def run(*jobs: dict[str, Any], status: str = "running", cost: float = 0.0) -> dict[str, Any]:
    configuration = {"type": "task", "name": "ray", "commands": ["true"], "nodes": max(1, len(jobs))}
    spec = {"run_name": "ray", "configuration": configuration, "repo_data": {"repo_type": "virtual"}, "ssh_key_pub": ""}
    known = {"id": str(uuid.uuid4()), "project_name": "main", "user": "admin", "submitted_at": BEGIN, "last_processed_at": BEGIN}
    return known | {"status": status, "run_spec": spec, "jobs": list(jobs), "cost": cost}


def host(number: int, status: str = "idle", **known: Any) -> dict[str, Any]:
    name = {"name": f"gpus-{number}", "hostname": f"10.0.0.{number}", "instance_num": number, "fleet_name": "gpus"}
    return {"id": str(uuid.uuid4()), "project_name": "main", "status": status, "created": BEGIN} | name | known


def fleet(*instances: dict[str, Any], name: str = "gpus", **ssh: Any) -> dict[str, Any]:
    """One of hosts that are reached over SSH."""
    config = {
        "user": "ubuntu",
        "identity_file": "~/.ssh/flotilla",
        "hosts": [known["hostname"] for known in instances] or ["10.0.0.9"],
    } | ssh
    spec = {"configuration": {"type": "fleet", "name": name, "ssh_config": config}, "profile": {"name": "default"}}
    known = {"id": str(uuid.uuid4()), "name": name, "project_name": "main", "created_at": BEGIN, "status": "active"}
    return known | {"spec": spec, "instances": list(instances)}


@contextmanager
def served() -> Iterator[Answers]:
    answers = Answers()

    class Handler(json_server.JsonHandler):
        def do_GET(self) -> None:
            self.send(200 if self.path in answers.pages else 404, answers.pages.get(self.path))

        def do_POST(self) -> None:
            self.body()
            path = self.path.removeprefix("/api/project/main/")
            if answers.refusals:
                if status := answers.refusals.pop(0):
                    self.send(status, {"detail": [{"msg": "not for you", "code": "error"}]})
                return
            if path == "runs/get":
                found = answers.run.pop(0) if isinstance(answers.run, list) and len(answers.run) > 1 else answers.run
                found = found[0] if isinstance(found, list) else found
                gone = {"detail": [{"msg": "Run not found", "code": "resource_not_exists"}]}
                self.send(200, found) if found else self.send(400, gone)
            elif path == "fleets/list":
                self.send(200, answers.fleets)
            else:
                self.send(404, {"detail": f"nothing at {path}"})

    with json_server.served(Handler) as answers.url:
        yield answers
