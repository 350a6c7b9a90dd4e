"""Pools of sandboxes, fleets[].sandboxes, as services: one on each node of such a fleet.

What it runs is trainer/environments/sandboxes/host/, which rendering lays beside this module. Jobs find all pools in the environment,
FLOTILLA_SERVICE_SANDBOXES_ALL.
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

from .service import Service

NAME = "sandboxes"
PORT = 8266
PROGRAM = Path(__file__).with_name(NAME)
READY_SECONDS = 60
SETTING = "flotilla:task.sandbox_port"


def services(text: str, rank: int, port: int, token: str | None) -> tuple[Service, ...]:
    """Those of --sandboxes, for all nodes; the command is that of this one. Raises ValueError."""
    if not text:
        return ()
    try:
        fleets: list[dict[str, Any]] = json.loads(text)
        ranks = tuple(sorted(rank for fleet in fleets for rank in fleet["ranks"]))
        own = next((fleet for fleet in fleets if rank in fleet["ranks"]), {"number": 0, "warm": 0, "memory_mb": 0})
        flags = [f"--{name.replace('_', '-')}={int(own[name])}" for name in ("number", "warm", "memory_mb")]
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"--sandboxes {text!r} is not JSON of fleets with ranks, number, warm, memory_mb: {error}") from None
    if not token:
        raise ValueError("--sandboxes needs a cluster with a token, RAY_AUTH_TOKEN: who connects would run commands here")
    program = shlex.join([sys.executable, "-I", "-S", "-B", str(PROGRAM), "pool", *flags])
    command = f'exec {program} --listen "$FLOTILLA_NODE_IP:{port}"'
    return (Service(NAME, command, ranks, port, "/health", READY_SECONDS, SETTING),)
