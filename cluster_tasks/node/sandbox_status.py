"""How full the pools of sandboxes are: on the head, for the dashboard's port and for Prometheus."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

from .sandbox_pool import NAME, PROGRAM, SETTING
from .service import Service
from .settings import Settings


def services(settings: Settings) -> list[Service]:
    """What answers /flotilla/at/sandboxes on the dashboard's port: how full each pool is."""
    pool = _pool(settings)
    if pool is None:
        return []
    with os.fdopen(os.open(token_file(settings), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(settings.dashboard.token or "")
    socket = settings.place / f"{NAME}.sock"
    (settings.routes / NAME).write_text(json.dumps({"socket": str(socket)}))
    words = [sys.executable, "-I", "-S", "-B", str(PROGRAM), "summary", "--socket", str(socket), *pool_addresses(settings)]
    return [Service(f"{NAME}-summary", f"exec {shlex.join(words)}")]


def pool_addresses(settings: Settings) -> list[str]:
    pool = _pool(settings)
    return [pool.url(address).removeprefix("http://") for address in pool.on_addresses(settings.addresses)] if pool else []


def token_file(settings: Settings) -> Path:
    """For Prometheus, which reads it from a file, in a folder of this agent's own."""
    return settings.place / f"{NAME}.token"


def _pool(settings: Settings) -> Service | None:
    return next((service for service in settings.services if service.setting == SETTING), None)
