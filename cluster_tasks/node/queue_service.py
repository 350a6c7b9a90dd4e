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
    runs = os.environ.get("FLOTILLA_RUNS")
    if not runs or settings.job:
        return []
    socket = settings.place / "queue.sock"
    (settings.routes / ROUTE).write_text(json.dumps({"socket": str(socket)}))
    words = ["--socket", socket, "--folder", folder(runs, settings.stack), "--ray", settings.ray_dashboard_port, "--stack", settings.stack]
    words += ["--nodes", len(settings.addresses), "--stop-seconds", settings.stop_timeout]
    words += ["--rules", settings.queue or "{}"]
    words += ["--gate", settings.gate, "--leaving", settings.leaving]
    return [Service("queue", f"exec {shlex.join([sys.executable, '-I', '-B', str(PROGRAM), *map(str, words)])}")]


def folder(runs: str, stack: str) -> Path:
    """Of the queue's file, beside the checkpoints."""
    return Path(runs) / f".queue-{stack or 'cluster'}"
