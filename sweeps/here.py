"""Trials as processes of this shell. They end with the driver, by the SIGTERM that has them save."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

from cluster_tasks.recipes.job.process import TIED
from sweeps.jobs import Job, Status
from trainer.cluster.placement import own_ray_runs
from trainer.errors import STOPPED, ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
SAVE_SECONDS = 60  # for a trial to save where the driver ends with an error


class Here:
    """Each in a process group of its own, with its output in its log, and with GPUs of its own where `places` names some for each."""

    def __init__(self, places: Sequence[str] = ()) -> None:
        self.free, self.taken = [*places], dict[str, str]()  # GPUs as CUDA_VISIBLE_DEVICES has them; by job
        self.started: dict[str, subprocess.Popen[bytes]] = {}
        self.held: set[str] = set()

    def submit(self, job: Job) -> None:
        own: dict[str, str] = {}
        if self.free or self.taken:
            self._give_back()
            self.taken[job.name] = self.free.pop(0)
            own = {VISIBLE: self.taken[job.name]}
        with job.log.open("ab") as log:
            self.started[job.name] = subprocess.Popen(
                [sys.executable, "-c", TIED, sys.executable, *job.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **job.env, **own},
                start_new_session=True,
            )

    def _give_back(self) -> None:
        """GPUs of those that have ended."""
        for name in [name for name in self.taken if self.started[name].poll() is not None]:
            self.free.append(self.taken.pop(name))

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


def places(parallel: int, gpus: float, env: Mapping[str, str] = os.environ) -> list[str]:
    """The GPUs of each of `parallel` trials; none where they take none, one runs at a time, or a Ray of this machine hands them out.

    Raises ConfigError where there are not enough.
    """
    each = math.ceil(gpus)
    if not each or parallel == 1 or own_ray_runs():
        return []
    have = env[VISIBLE].split(",") if env.get(VISIBLE) else _listed()
    if parallel * each > len(have):
        need = f"{parallel} trials with {each} GPUs each need {parallel * each}"
        raise ConfigError(f"--parallel {parallel}: {need}, and this machine has {len(have)}; at most {len(have) // each} fit")
    return [",".join(have[i * each : (i + 1) * each]) for i in range(parallel)]


def _listed() -> list[str]:
    try:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [str(number) for number, line in enumerate(line for line in found.splitlines() if line.startswith("GPU "))]
