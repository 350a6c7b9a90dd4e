"""A process that forwards a port to this machine: for as long as its command runs, or kept in build/<stack>/tunnel.json until `down`."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil  # not in the extra `client`, whose commands say what they miss

END_SECONDS = 10


def start(command: list[str], log: Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """In a session of its own: Ctrl-C is for us, who ask what it means."""
    with log.open("wb") as output:
        return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True)


def open_kept(command: list[str], folder: Path, answers: Callable[[], bool], seconds: float) -> str | None:
    """Starts and keeps it: None once it answers, else the last line that its command printed."""
    log = folder / "tunnel.log"
    process, deadline = start(command, log), time.monotonic() + seconds
    while not (there := answers()) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    if there:
        keep(process, folder)
        return None
    end(process)
    return (log.read_text(errors="replace").strip().splitlines() or ["no answer"])[-1]


def end(process: subprocess.Popen[bytes] | psutil.Process) -> None:
    """SIGINT, at which `dstack attach` takes its SSH along; SIGKILL where that does not help."""
    import psutil

    process.send_signal(signal.SIGINT)
    try:
        process.wait(END_SECONDS)
    except (subprocess.TimeoutExpired, psutil.TimeoutExpired):
        process.kill()
        if isinstance(process, subprocess.Popen):
            process.wait()  # another's child stays a zombie where nobody reaps it, as in a container without an init


def keep(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Notes the process, so that `flotilla down` finds it, and ends the one that was noted before."""
    import psutil

    close(folder)
    started = psutil.Process(process.pid).create_time()
    (folder / "tunnel.json").write_text(json.dumps({"pid": process.pid, "started": started}) + "\n")


def running(folder: Path) -> psutil.Process | None:
    """The process that this folder keeps, if it lives. Its start tells it from a later process with the same id."""
    import psutil

    try:
        noted = json.loads((folder / "tunnel.json").read_text())
        process = psutil.Process(noted["pid"])
        same = process.create_time() == noted["started"] and process.status() != psutil.STATUS_ZOMBIE
        return process if same else None
    except (OSError, ValueError, KeyError, TypeError, psutil.Error):
        return None


def close(folder: Path) -> bool:
    """Ends the process that this folder keeps; False where there was none."""
    process = running(folder)
    if process:
        end(process)
    (folder / "tunnel.json").unlink(missing_ok=True)
    return process is not None
