"""A cluster that was started on this machine: what cluster.json says of it, its end, what it leaves."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from cluster_tasks.identity import ADDRESS
from cluster_tasks.local.plan import MARKER, LocalError, Ports, is_own, ray_folder
from cluster_tasks.local.supervisor import STOP_GRACE_SECONDS
from stacks.host import processes

KILL_SECONDS = 10  # for a process to be gone after SIGKILL


@dataclass(frozen=True)
class Cluster:
    """A cluster that was started here; kept in cluster.json."""

    root: str
    pid: int  # of the guard, see supervisor.py
    started: str
    dashboard: str  # URL
    ports: Ports
    task: str  # digest of the task file that it was started from

    @property
    def supervisor(self) -> psutil.Process | None:
        """None when it has ended."""
        return processes.find(self.pid, MARKER, self.root)

    def write(self) -> None:
        (Path(self.root) / "cluster.json").write_text(json.dumps(asdict(self), indent=2) + "\n")
        (Path(self.root) / ADDRESS).write_text(f"{self.dashboard}\n")  # env.sh reads it

    @classmethod
    def running(cls, root: Path) -> Cluster | None:
        """The cluster of this folder, if it lives."""
        try:
            data = json.loads((root / "cluster.json").read_text())
            cluster = cls(**data | {"ports": Ports(**data["ports"])})
        except (FileNotFoundError, json.JSONDecodeError, KeyError, TypeError):
            return None
        return cluster if cluster.supervisor else None


def end(supervisor: subprocess.Popen[bytes] | psutil.Process, root: Path, seconds: float) -> bool:
    """Waits for a supervisor that was asked to stop, kills what is left at the deadline, and cleans up. False where it had to kill.

    Raises LocalError where the kernel does not let the supervisor go.
    """
    in_time = True
    try:
        supervisor.wait(seconds)
    except (psutil.TimeoutExpired, subprocess.TimeoutExpired):
        in_time = False
        supervisor.kill()
        try:
            supervisor.wait(KILL_SECONDS)
        except (psutil.TimeoutExpired, subprocess.TimeoutExpired):
            raise LocalError(f"the supervisor, pid {supervisor.pid}, was killed but has not ended within {KILL_SECONDS} s") from None
    kill_marked(root)
    clean_up(root)
    return in_time


def kill_marked(root: Path) -> int:
    """Last resort, for a cluster that lost its supervisor and guard: kills whoever carries its marker. Returns how many."""
    ours = {process.pid for process in [psutil.Process(), *psutil.Process().parents()]}
    marked = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid not in ours and process.environ().get(MARKER) == str(root):
                process.kill()
                marked.append(process)
    psutil.wait_procs(marked, timeout=STOP_GRACE_SECONDS)
    return len(marked)


def clean_up(root: Path) -> None:
    """Keeps Ray's logs beside ours, removes its folder and cluster.json."""
    folder = ray_folder(root)
    if is_own(folder):
        for session in folder.glob("*/session_latest/logs"):
            kept = root / "logs" / f"ray-{session.parents[1].name}"
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(session.resolve(), kept, symlinks=True)
        shutil.rmtree(folder, ignore_errors=True)
    for name in ("cluster.json", ADDRESS):
        (root / name).unlink(missing_ok=True)


def tail(root: Path, count: int = 12) -> str:
    """Last lines of all our logs."""
    logs = sorted((root / "logs").glob("*.log"))
    return "\n".join(f"--- {log}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-count:]) for log in logs)
