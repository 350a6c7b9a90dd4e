"""The one job of a container: what the server has sent, and what it may ask for."""

from __future__ import annotations

import base64
import re
import signal
import subprocess
import threading
import time
from dataclasses import dataclass, field
from typing import Any

KILL_SECONDS = 10
ESCAPES = re.compile(rb"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07]*\x07|.)|\t")


@dataclass
class Job:
    """What the server has sent and may ask for."""

    body: dict[str, Any] = field(default_factory=dict)
    states: list[dict[str, Any]] = field(default_factory=list)
    logs: list[dict[str, Any]] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)
    archives: dict[str, bytes] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    stopped: bool = False
    overtime: bool = False
    done: bool = False
    pulled: bool = False  # the server has seen the end
    last: int = 0

    def stamp(self) -> int:
        self.last = max(self.last + 1, int(time.time() * 1000))
        return self.last

    def state(self, name: str, reason: str = "", message: str = "", code: int | None = None) -> None:
        with lock:
            told = {"state": name, "timestamp": self.stamp(), "termination_reason": reason, "termination_message": message}
            self.states.append(told | {"exit_status": code})

    def output(self, data: bytes) -> None:
        with lock:
            self.logs.append({"timestamp": self.stamp(), "message": base64.b64encode(plain(data)).decode()})
            self.raw.append(data)

    def interrupt(self) -> None:
        process = self.process
        if process and process.poll() is None:
            process.send_signal(signal.SIGINT)
            threading.Timer(KILL_SECONDS, lambda: process.poll() is None and process.kill()).start()


job, lock = Job(), threading.Lock()


def plain(data: bytes) -> bytes:
    """What `dstack logs` gets: no escape sequences, no tabs, text before a lone carriage return overwritten."""
    return re.sub(rb"[^\n]*\r(?=[^\n])", b"", ESCAPES.sub(b"", data).replace(b"\r\n", b"\n"))
