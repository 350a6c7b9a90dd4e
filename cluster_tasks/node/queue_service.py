"""The cluster's queue of jobs, as a service of the head: what it runs is job_queue/.

It listens on a socket in a folder of this agent's own, and is reached by /flotilla/at/queue on the dashboard's
port, by who shows the token.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

from .service import Service
from .settings import Settings

ROUTE = "queue"
PROGRAM = Path(__file__).with_name("job_queue")


def services(settings: Settings) -> list[Service]:
    """None where this agent knows no folder that the next head sees, or runs one job of its own."""
    if not is_here(settings):
        return []
    runs = os.environ["FLOTILLA_RUNS"]
    if token := settings.dashboard.token:  # for Prometheus, which reads it from a file
        with os.fdopen(os.open(token_file(settings), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(token)
    socket = settings.place / "queue.sock"
    (settings.routes / ROUTE).write_text(json.dumps({"socket": str(socket)}))
    words = ["--socket", socket, "--folder", folder(runs, settings.stack), "--ray", settings.ray_dashboard_port, "--stack", settings.stack]
    words += ["--nodes", len(settings.addresses), "--stop-seconds", settings.stop_timeout]
    words += ["--rules", settings.queue or "{}"]
    words += ["--gate", settings.gate, "--leaving", settings.leaving]
    if settings.alerts_port and settings.alerts_secret:
        words += ["--alerts-port", settings.alerts_port, "--alerts-secret", settings.alerts_secret]
    return [Service("queue", f"exec {shlex.join([sys.executable, '-I', '-B', str(PROGRAM), *map(str, words)])}")]


def folder(runs: str, stack: str) -> Path:
    """Of the queue's file, beside the checkpoints."""
    return Path(runs) / f".queue-{stack or 'cluster'}"


def is_here(settings: Settings) -> bool:
    return bool(os.environ.get("FLOTILLA_RUNS")) and not settings.job


def token_file(settings: Settings) -> Path:
    """In a folder of this agent's own."""
    return settings.place / "queue.token"
