"""What the queue asks of Ray on this head: its nodes, its jobs, what they hold; and to start and stop one."""

from __future__ import annotations

import http.client
import urllib.error
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..dashboard import FLEET, Dashboard, written
from .jobs import Job, Size

UPLOAD_SECONDS = 300
MARK = "queued_as"  # in the metadata of the queue's own jobs


@dataclass(frozen=True)
class Seen:
    """One look at Ray."""

    nodes: int
    gpus: float
    cpus: float
    used_gpus: float
    used_cpus: float
    jobs: Mapping[str, Mapping[str, Any]]  # by submission id
    drivers: bool = False  # whether one runs that nobody submitted, such as a shell's


class RayJobs:
    """Raises OSError where Ray does not answer."""

    def __init__(self, dashboard: Dashboard):
        self.dashboard = dashboard

    def look(self) -> Seen:
        """Of the nodes that are there now, without elastic ones: rollout engines alone are on those, of whoever runs."""
        try:
            found = self.dashboard.ask("/api/v0/nodes?limit=10000&detail=1")["data"]["result"]["result"]
        except (KeyError, TypeError) as error:  # while it starts it answers with errors
            raise OSError(f"the list of nodes has no {error}") from None
        nodes = [node for node in found if node["state"] == "ALIVE" and FLEET not in (node.get("labels") or {})]
        totals = [sum(node["resources_total"].get(kind, 0.0) for node in nodes) for kind in ("GPU", "CPU")]
        known = self.dashboard.ask("/api/jobs/")
        listed = {job["submission_id"]: job for job in known if job.get("submission_id")}
        drivers = any(job["status"] == "RUNNING" for job in known if not job.get("submission_id"))
        gpus, cpus = self._used()
        return Seen(len(nodes), totals[0], totals[1], gpus, cpus, listed, drivers)

    def _used(self) -> tuple[float, float]:
        """GPUs and CPUs that are reserved or in use, by anybody."""
        try:
            usage = self.dashboard.ask("/api/cluster_status")["data"]["clusterStatus"]["loadMetricsReport"]["usage"] or {}
        except (KeyError, TypeError):  # a cluster that has just started has no report
            return 0.0, 0.0
        return (usage.get("GPU") or [0.0, 0.0])[0], (usage.get("CPU") or [0.0, 0.0])[0]

    def start(self, submission: str, job: Job, size: Size) -> None:
        """Nothing where Ray has had this submission: an earlier try of ours arrived after all."""
        body: dict[str, Any] = {"entrypoint": job.command_at(size), "submission_id": submission, "runtime_env": dict(job.runtime_env)}
        body["metadata"] = {**job.metadata, MARK: job.name}
        if job.driver:
            body |= {"entrypoint_num_gpus": size.gpus, "entrypoint_num_cpus": size.cpus}
        try:
            self.dashboard.ask("/api/jobs/", body)
        except urllib.error.HTTPError as error:
            if self.status(submission) is None:
                said = error.read().decode(errors="replace").strip().splitlines()
                raise OSError(f"Ray does not take {submission}: {said[-1][:300] if said else error.reason}") from error

    def status(self, submission: str) -> Mapping[str, Any] | None:
        """None where Ray knows no such job."""
        try:
            return self.dashboard.ask(f"/api/jobs/{submission}")
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise

    def stop(self, submission: str) -> None:
        self.dashboard.stop(submission)

    def progress(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """What a run of the trainer says of itself (trainer/metrics/progress.py); empty where there is nothing."""
        found = written(self.dashboard, dict(job), "progress")
        return found if isinstance(found, dict) else {}

    def upload(self, package: Path) -> None:
        """Gives Ray the folder of a job; nothing where it has it. Raises OSError where the file is gone."""
        path = f"/api/packages/gcs/{package.name}"
        try:
            self.dashboard.read(path)
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
        else:
            return
        put(self.dashboard, path, package.read_bytes())


def put(dashboard: Dashboard, path: str, content: bytes) -> None:
    """Raises OSError, of which HTTPError has what was answered."""
    parts = urlsplit(dashboard.url)
    headers = {"Authorization": f"Bearer {dashboard.token}"} if dashboard.token else {}
    connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = connect(parts.hostname or "", parts.port, timeout=UPLOAD_SECONDS)
    try:
        dashboard.verify(connection)
        connection.request("PUT", f"{parts.path}{path}", content, headers)
        answer = connection.getresponse()
        said = answer.read()
    except http.client.HTTPException as error:
        raise OSError(f"{path}: {error}") from error
    finally:
        connection.close()
    if answer.status >= 300:
        raise OSError(f"{path}: HTTP {answer.status} {said[:300].decode(errors='replace')}")
