"""Trials as jobs of the queue (cluster_tasks/node/job_queue) of the cluster on which the driver is a job: they wait for room instead
of taking it from other people's runs, a dearer job may pause one, and it comes back by itself.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sweeps.cluster import Cluster
from sweeps.jobs import Job, Status
from trainer.errors import STOPPED
from trainer.plan.needs import needs
from trainer.runs.alive import ROUTES, URL

ROUTE = "queue"
PRIORITY = 40  # of a trial: behind what people submit one by one, where they say nothing
FOUND: Mapping[str, Status] = {
    "waiting": Status("waiting"),
    "paused": Status("waiting"),  # for a dearer job: the queue brings it back
    "running": Status("running"),
    "pausing": Status("pausing"),
    "held": Status("paused", STOPPED),  # at its rung by itself, or by `hold`
    "succeeded": Status("succeeded", 0),
    "failed": Status("failed", 1),
    "cancelled": Status("cancelled", STOPPED),
}


def url(env: Mapping[str, str] = os.environ) -> str | None:
    """Of the queue, from a job of the cluster; None where it has none."""
    routes, front = env.get(ROUTES), env.get(URL)
    return f"{front}/flotilla/at/{ROUTE}" if routes and front and (Path(routes) / ROUTE).exists() else None


def client_of(address: str) -> Any:
    """Ray's own, for the queue answers as Ray does; the variable that names the cluster goes before what a client is given."""
    from ray.job_submission import JobSubmissionClient

    for name in ("ray", JobSubmissionClient.__bases__[0].__module__):  # it says of every trial that its folder is there
        logging.getLogger(name).setLevel(logging.WARNING)
    kept = {name: os.environ.pop(name) for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS") if name in os.environ}
    try:
        return JobSubmissionClient(address)
    finally:
        os.environ.update(kept)


class Queued(Cluster):
    def __init__(self, queue: Any, client: Any = None, env: Mapping[str, str] = os.environ) -> None:
        """`queue`: Ray's client of the queue; `client`: of the cluster itself, for what jobs printed."""
        super().__init__(client, env)
        self.queue, self.ended = queue, dict[str, Status]()

    def submit(self, job: Job) -> None:
        self.known[job.name] = job
        at = next(at for at, word in enumerate(job.command) if word.startswith("trainer.train_"))
        known = needs(job.command[at].removeprefix("trainer."), [*job.command[at + 1 :]])
        own = {"sizes": known["sizes"], "driver": known["driver"], "priority": PRIORITY}
        variables = {**(self.runtime_env.get("env_vars") or {}), **job.env}
        self.queue.submit_job(
            entrypoint=shlex.join(["python", *job.command]),
            submission_id=job.name,
            # The folder in which this driver runs: the queue keeps it, where Ray forgets its own copy.
            runtime_env={**self.runtime_env, "working_dir": ".", "env_vars": variables},
            metadata={**self.metadata, "queue": json.dumps(own)},
        )

    def listed(self) -> dict[str, Status]:
        listed = self._asked("GET", "/queue")["jobs"]
        found = {each["name"]: FOUND[each["state"]] for each in listed}
        for each in listed:
            if each["state"] == "held" and each["name"] in self.known:  # its next leg is another job
                self.ended[each["name"]] = found[each["name"]]
                self._asked("POST", f"/queue/jobs/{each['name']}", {"do": "cancel"})
        return found | self.ended

    def output(self, name: str) -> str:
        attempt = self._asked("GET", f"/queue/jobs/{name}")["submission"]
        return self.client.get_job_logs(attempt) if attempt else ""

    def _asked(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        answer = self.queue._do_request(method, path, json_data=body)
        if answer.status_code >= 300:
            raise RuntimeError(f"the queue answers {answer.status_code}: {answer.text[:300]}")
        return answer.json()

    def hold(self, name: str) -> None:
        self._asked("POST", f"/queue/jobs/{name}", {"do": "hold"})

    def cancel(self, name: str) -> None:
        self._asked("POST", f"/queue/jobs/{name}", {"do": "cancel"})
