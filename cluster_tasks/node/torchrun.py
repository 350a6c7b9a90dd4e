"""No Ray: this node's torchrun."""

from __future__ import annotations

import logging
import os
import shlex
from typing import NoReturn

from .network import interfaces
from .settings import Settings

log = logging.getLogger(__name__)


def run_torchrun(settings: Settings) -> NoReturn:
    """Becomes torchrun. A SIGUSR1 reaches its ranks, which have --stop-timeout seconds to save."""
    stop = {"TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGUSR1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(settings.stop_timeout)}
    head, size = settings.addresses[0], len(settings.addresses)
    flags = {"--nnodes": size, "--node-rank": settings.rank, "--nproc-per-node": settings.gpus or 1}
    flags |= {"--master-addr": head, "--master-port": settings.port}
    command = ["torchrun", *(f"{name}={value}" for name, value in flags.items()), *shlex.split(settings.torchrun)]
    log.info("%s", shlex.join(command))
    os.execvpe(command[0], command, stop | interfaces(settings.addresses[settings.rank]) | os.environ)
