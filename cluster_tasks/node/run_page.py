"""The page of the cluster's runs, as a service of the head: what it runs is trainer/page/, which rendering lays beside this module.

It listens on a socket in a folder of this agent's own, and is reached by /flotilla/at/runs on the dashboard's port, by who shows the token.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import sys
from pathlib import Path

from .service import Service
from .settings import Settings

ROUTE = "runs"
PROGRAM = Path(__file__).with_name("page")

log = logging.getLogger(__name__)


def services(settings: Settings) -> list[Service]:
    """None where this agent was copied without the page, or knows no folder of runs."""
    runs = os.environ.get("FLOTILLA_RUNS")
    if not (PROGRAM / "__main__.py").is_file() or not runs:
        return []
    socket = settings.place / "page.sock"
    (settings.routes / ROUTE).write_text(json.dumps({"socket": str(socket)}))
    return [Service("page", f"exec {shlex.join([python_of_ray(), '-I', str(PROGRAM), '--socket', str(socket), runs])}")]


def python_of_ray() -> str:
    """The interpreter whose packages Ray has, as the page needs one of them, aiohttp."""
    ray = shutil.which("ray")
    beside = Path(ray).resolve().with_name("python3") if ray else None
    return str(beside) if beside and beside.exists() else sys.executable
