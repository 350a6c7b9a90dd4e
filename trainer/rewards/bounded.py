"""A function in a forked process, which the kernel ends where a call takes more CPU time or memory than it may, in C code too.

What the function imports is loaded before the fork, so the process that replaces an ended one starts within milliseconds.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock
from typing import Any

MEMORY = 1 << 30  # bytes that calls may take on top of what is there at the fork


class Bounded:
    """Calls of one function, one at a time."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self.owner = self.pid = 0  # who forked, and what
        self.channel: Connection | None = None
        self.lock = Lock()

    def __call__(self, seconds: float, *args: Any) -> Any:
        """What it returns; None where it takes more than so many `seconds` of CPU time, or ends its process. Raises what it raises."""
        with self.lock:
            if self.channel is None or self.owner != os.getpid():  # a process that forked has the same channel, and no right to it
                self._fork()
            assert self.channel is not None
            try:
                self.channel.send((seconds, args))
                value, raised = self.channel.recv()
            except (EOFError, ConnectionError):
                self.channel.close()
                self.channel = None
                with suppress(ChildProcessError):
                    os.waitpid(self.pid, 0)
                return None
        if raised is not None:
            raise raised
        return value

    def _fork(self) -> None:
        self.channel, theirs = Pipe()
        self.owner, self.pid = os.getpid(), os.fork()
        if self.pid == 0:
            try:
                _serve(self.function, theirs)
            finally:
                os._exit(1)
        theirs.close()


def _serve(function: Callable[..., Any], channel: Connection) -> None:
    """Until the other end is closed: by whoever calls, or because he was ended."""
    own = channel.fileno()
    os.closerange(3, own)  # what others wait for the end of
    os.closerange(own + 1, os.sysconf("SC_OPEN_MAX"))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    with suppress(OSError, ValueError):  # no /proc, or a lower limit is set
        limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    while True:
        try:
            seconds, args = channel.recv()
        except EOFError:
            os._exit(0)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            outcome = function(*args), None
        except Exception as error:
            outcome = None, error
        signal.setitimer(signal.ITIMER_PROF, 0)
        channel.send(outcome)
