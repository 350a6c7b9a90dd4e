"""The job of --job, and the end of all jobs."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import subprocess
import time
import urllib.error
from dataclasses import dataclass

from .dashboard import Dashboard
from .errors import NOT_READY, Failure
from .ray import RAY_DEFAULTS, spawn
from .settings import Settings

SUBMIT_SECONDS = 300  # to upload the working directory and be accepted

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """The job of --job, and `ray job submit`, which uploads it and then prints its output."""

    name: str
    client: subprocess.Popen[bytes]
    deadline: float  # to be accepted

    @classmethod
    def submit(cls, settings: Settings) -> Job:
        """Under Slurm the name tells requeued attempts apart."""
        attempt = [os.environ.get("SLURM_JOB_ID") or str(int(time.time())), os.environ.get("SLURM_RESTART_COUNT")]
        name = "-".join(["job", *filter(None, attempt)])
        command = ["ray", "job", "submit", "--address", settings.dashboard.url, "--submission-id", name]
        command += ["--working-dir", settings.working_dir] if settings.working_dir else []
        command += ["--runtime-env", settings.runtime_env] if settings.runtime_env else []
        command += ["--", *shlex.split(settings.job or "")]
        log.info("submitting %s: %s", name, settings.job)
        return cls(name, spawn(command, RAY_DEFAULTS | os.environ), time.monotonic() + SUBMIT_SECONDS)

    def exit_code(self, dashboard: Dashboard) -> int | None:
        """None while it runs; its output is printed to the end before this returns a code. Raises Failure where Ray does not take it."""
        client_ended = self.client.poll() is not None  # looked at first: when it has ended, Ray knows the job
        try:
            code = dashboard.exit_code(self.name)
        except urllib.error.HTTPError as error:
            if error.code == 404 and client_ended:
                raise Failure(2, "the job was not accepted; the lines above say why") from None
            if error.code == 404 and time.monotonic() > self.deadline:
                raise Failure(NOT_READY, f"the job was not accepted within {SUBMIT_SECONDS} s") from None
            return None
        except OSError:
            return None  # watch_cluster counts how long the dashboard is silent
        if code is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.client.wait(10)
            log.info("%s has ended with exit code %d", self.name, code)
        return code


def stop_jobs(settings: Settings, seconds: int) -> None:
    """Sends SIGTERM to all jobs that run and waits until they have saved their checkpoints and ended."""
    with contextlib.suppress(OSError):  # the queue is told first
        settings.leaving.touch()
    deadline = time.monotonic() + seconds + min(seconds, 10)
    asked: set[str] = set()
    jobs: list[str] = []
    while time.monotonic() < deadline:
        try:
            listed = settings.dashboard.ask("/api/jobs/")
            jobs = [j["submission_id"] for j in listed if j["status"] in ("PENDING", "RUNNING") and j["submission_id"]]
            for job in set(jobs) - asked:
                log.info("asking %s to save and stop, at most %d s", job, seconds)
                settings.dashboard.stop(job)
                asked.add(job)
        except OSError as error:
            return log.warning("jobs cannot be asked to stop, the dashboard does not answer: %s", error)
        if not jobs:
            return None
        time.sleep(0.5)
    names, where = ", ".join(sorted(jobs)), f"{settings.ray_logs}/job-driver-*.log"
    return log.error("jobs did not save and stop within %d s (--stop-timeout): %s; %s", seconds, names, where)
