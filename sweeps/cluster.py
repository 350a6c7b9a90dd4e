"""Trials as jobs of the Ray cluster on which the driver is itself a job: with its working directory, environment and owner.

They outlive a driver that dies: the next one finds them by name. Their output is copied to the sweep's logs when they end.
"""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Mapping
from typing import Any

from sweeps.jobs import ENDED, Job, Status
from trainer.errors import STOPPED, ConfigError

SILENT_SECONDS = 300
OWN = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # Ray sets it for what it was given as a job


def is_job(env: Mapping[str, str] = os.environ) -> bool:
    return OWN in env


class Cluster:
    def __init__(self, client: Any = None, env: Mapping[str, str] = os.environ) -> None:
        if client is None:
            from ray.job_submission import JobSubmissionClient

            client = JobSubmissionClient()
        self.client = client
        own: dict[str, Any] = json.loads(env.get(OWN) or "{}")
        self.runtime_env: dict[str, Any] = own.get("runtime_env") or {}
        self.metadata = {key: value for key, value in (own.get("metadata") or {}).items() if key in ("owner", "commit", "changed_files")}
        self.held: set[str] = set()
        self.known: dict[str, Job] = {}
        self.last: dict[str, Status] = {}
        self.answered = time.monotonic()
        self.told: set[str] = set()  # jobs whose output was copied

    def submit(self, job: Job) -> None:
        variables = {**(self.runtime_env.get("env_vars") or {}), **job.env}
        self.known[job.name] = job
        self.client.submit_job(
            entrypoint=shlex.join(["python", *job.command]),
            submission_id=job.name,
            runtime_env={**self.runtime_env, "env_vars": variables},
            metadata=self.metadata,
        )

    def jobs(self) -> dict[str, Status]:
        """As last known while the cluster does not answer. Raises ConfigError after SILENT_SECONDS of that."""
        try:
            found = self.listed()
        except (OSError, RuntimeError) as error:  # as Ray's client raises what its dashboard answers
            if time.monotonic() - self.answered > SILENT_SECONDS:
                why = str(error).partition("\n")[0]
                raise ConfigError(
                    f"the cluster's job API has not answered for {SILENT_SECONDS} s: {why}; the same command resumes"
                ) from None
            return self.last
        self.answered, self.last = time.monotonic(), found
        for name in self.known.keys() - self.told:
            if name in found and found[name].state in ENDED:
                self.told.add(name)
                with self.known[name].log.open("a") as log:
                    log.write(self.output(name))
        return found

    def listed(self) -> dict[str, Status]:
        return {each.submission_id: self._status(each) for each in self.client.list_jobs() if each.submission_id}

    def output(self, name: str) -> str:
        return self.client.get_job_logs(name)

    def _status(self, details: Any) -> Status:
        word, code = str(getattr(details.status, "value", details.status)), details.driver_exit_code
        if word == "PENDING":
            return Status("waiting")
        if word == "RUNNING":
            return Status("pausing" if details.submission_id in self.held else "running")
        if word == "SUCCEEDED":
            return Status("succeeded", 0)
        if word == "STOPPED" or code in (STOPPED, -15):  # asked to stop: how far it came its folder says
            return Status("paused", STOPPED)
        return Status("failed", 1 if code is None else code if code >= 0 else 128 - code)

    def hold(self, name: str) -> None:
        self.held.add(name)
        self.client.stop_job(name)

    def release(self, name: str) -> None:
        """Ray's jobs are not held back: a trial goes on as a new one."""

    def cancel(self, name: str) -> None:
        self.client.stop_job(name)

    def close(self) -> None:
        """Jobs of the cluster outlive their driver."""
