"""A process that forwards the dashboard to this machine and outlives the command that started it; kept in build/<stack>/tunnel.json."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import psutil

END_SECONDS = 10


def keep(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Notes the process, so that `flotilla down` finds it."""
    started = psutil.Process(process.pid).create_time()
    (folder / "tunnel.json").write_text(json.dumps({"pid": process.pid, "started": started}) + "\n")


def running(folder: Path) -> psutil.Process | None:
    """The forwarder of this folder, if it lives. Its start tells it from a later process with the same id."""
    try:
        noted = json.loads((folder / "tunnel.json").read_text())
        process = psutil.Process(noted["pid"])
        same = process.create_time() == noted["started"] and process.status() != psutil.STATUS_ZOMBIE
        return process if same else None
    except (OSError, ValueError, KeyError, psutil.Error):
        return None


def close(folder: Path) -> bool:
    """Ends the forwarder; False where there was none."""
    process = running(folder)
    if process:
        process.send_signal(signal.SIGINT)  # `dstack attach` takes its SSH along
        try:
            process.wait(END_SECONDS)
        except psutil.TimeoutExpired:
            process.kill()
    (folder / "tunnel.json").unlink(missing_ok=True)
    return process is not None
