"""Programs that this one starts, and ends with all that they started."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence

# Becomes the command, after it has asked the kernel for a SIGTERM when its parent dies: PR_SET_PDEATHSIG.
TIED = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execvp(sys.argv[1], sys.argv[1:])"
MARGIN = 5  # seconds before Ray ends us by force


class JobError(Exception):
    """Why the run ends, in one line; `code` is what to end with."""

    def __init__(self, message: str, code: int = 2):
        super().__init__(message)
        self.code = code


class Stopped(BaseException):
    """SIGTERM; not an Exception, so that nobody takes it for a failure."""


def say(line: str) -> None:
    print(f"recipe: {line}", flush=True)


def stop_seconds() -> float:
    """How long a program that is asked to stop may save."""
    return max(float(os.environ.get("RAY_JOB_STOP_WAIT_TIME_S", "30")) - MARGIN, MARGIN)


def start(command: Sequence[str], captured: bool = False) -> subprocess.Popen[str]:
    """In a process group of its own, which is asked to stop when this process dies. Raises JobError where there is no such program."""
    if shutil.which(command[0]) is None:
        raise JobError(f"{command[0]} is not on PATH", 127)
    return subprocess.Popen(
        [sys.executable, "-c", TIED, *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if captured else None,
        stderr=subprocess.STDOUT if captured else None,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def end(process: subprocess.Popen[str], seconds: float) -> None:
    """Asks the whole group to stop, and ends it by force after `seconds`."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def call(command: Sequence[str], timeout: float | None = None, captured: bool = False) -> tuple[int, str]:
    """Exit code, 128 + its number after a signal, and the output where it is captured. Raises JobError after `timeout` seconds."""
    process = start(command, captured)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        end(process, MARGIN)
        raise JobError(f"`{' '.join(command[:4])} ...` has not ended within {timeout:g} s") from None
    except BaseException:
        end(process, stop_seconds())
        raise
    code = process.returncode
    return (code if code >= 0 else 128 - code), output or ""
