"""Trials as processes of this shell. They end with the driver, by the SIGTERM that has them save."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress

from cluster_tasks.recipes.job.process import TIED
from sweeps.jobs import Job, Status
from trainer.errors import STOPPED

SAVE_SECONDS = 60  # for a trial to save where the driver ends with an error


class Here:
    """Each in a process group of its own, with its output in its log."""

    def __init__(self) -> None:
        self.started: dict[str, subprocess.Popen[bytes]] = {}
        self.held: set[str] = set()

    def submit(self, job: Job) -> None:
        with job.log.open("ab") as log:
            self.started[job.name] = subprocess.Popen(
                [sys.executable, "-c", TIED, sys.executable, *job.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **job.env},
                start_new_session=True,
            )

    def jobs(self) -> dict[str, Status]:
        return {name: self._status(name, process) for name, process in self.started.items()}

    def _status(self, name: str, process: subprocess.Popen[bytes]) -> Status:
        code = process.poll()
        if code is None:
            return Status("pausing" if name in self.held else "running")
        code = code if code >= 0 else 128 - code
        return Status("succeeded" if code == 0 else "paused" if code == STOPPED else "failed", code)

    def hold(self, name: str) -> None:
        self.held.add(name)
        with suppress(ProcessLookupError):
            os.kill(self.started[name].pid, signal.SIGTERM)

    def release(self, name: str) -> None:
        """Processes are not held back: they go on by being submitted again."""

    def cancel(self, name: str) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.started[name].pid, signal.SIGKILL)

    def close(self) -> None:
        running = [name for name, process in self.started.items() if process.poll() is None]
        for name in running:
            self.hold(name)
        for name in running:
            try:
                self.started[name].wait(SAVE_SECONDS)
            except subprocess.TimeoutExpired:
                self.cancel(name)
                self.started[name].wait()
