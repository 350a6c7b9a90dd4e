"""Whether this node's GPUs are fit to join, by burn_in.py, which runs with the torch of the image."""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

from .errors import UNFIT, Failure
from .settings import Settings
from .waiting import pause

PROGRAM = Path(__file__).with_name("burn_in.py")
KILL_SECONDS = 10
LATE_SECONDS = 180  # beside the burn-in's own: torch's start, and the round that is at work when they are over

log = logging.getLogger(__name__)


def burn_in(settings: Settings) -> None:
    """Returns when it has passed. Raises Failure, Stopped at a signal."""
    own = settings.addresses[settings.rank]
    log.info("burn-in of %s, for %d s", own, settings.burn_in)
    command = [sys.executable, str(PROGRAM), str(settings.burn_in)]
    deadline = time.monotonic() + settings.burn_in + LATE_SECONDS
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=output, stderr=errors)
        try:
            while (code := process.poll()) is None:
                if time.monotonic() > deadline:
                    raise Failure(UNFIT, f"{own}: the burn-in did not end within {settings.burn_in + LATE_SECONDS} s: a GPU hangs")
                pause(0.5)
        finally:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # a process that waits for such a GPU does not end
                process.wait(KILL_SECONDS)
        said, complaints = last_line(output), last_line(errors)
    try:
        found = json.loads(said)
        bad = found["errors"]
    except (ValueError, TypeError, KeyError):
        raise Failure(UNFIT, f"{own}: the burn-in ended with {code}: {complaints or said or 'it said nothing'}") from None
    wanted = settings.node_gpus[settings.rank] if settings.node_gpus else settings.gpus or 0
    if (seen := sum(name.startswith("GPU") for name in found.get("devices", []))) < wanted and not bad:
        bad = [f"torch sees {seen} GPUs, this node is to have {wanted}"]
    if bad:
        raise Failure(2 if code == 2 else UNFIT, "\n".join(f"{own}: burn-in: {error}" for error in bad))
    speeds = f"{min(found['tflops']):.3g} to {max(found['tflops']):.3g} TFLOP/s"
    bandwidth = "" if found["bandwidth"] is None else f", all-reduce {found['bandwidth']:.0f} GB/s"
    log.info(
        "burn-in: %d x %s, %d rounds, %s%s",
        len(found["devices"]),
        found["devices"][0].partition(" (")[2].rstrip(")") or "CPU",
        found["rounds"],
        speeds,
        bandwidth,
    )


def last_line(file: IO[str]) -> str:
    file.seek(0)
    return (file.read().strip().splitlines() or [""])[-1]
