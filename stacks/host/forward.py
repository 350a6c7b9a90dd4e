"""The dstack server of a control node on a port of this machine, opened where nothing answers there and closed by who opened it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import IO

from stacks.errors import UserError
from stacks.places import control_of
from stacks.schema import Stack

NEW_SECONDS = 600.0  # a new control node installs its server first
LOOK_SECONDS = 60.0  # for one that is there
ASK_SECONDS = 5.0
EVERY_SECONDS = 0.5  # between two looks
SAY_SECONDS = 15.0  # between words about the wait
END_SECONDS = 10.0
TAIL = 2000  # bytes of what the command printed
# Words after which a cloud's command will not do better next time; before a machine has booted they fail with others.
HOPELESS = (
    *("AccessDenied", "not authorized", "PERMISSION_DENIED", "Unable to locate credentials", "Token has expired", "ExpiredToken"),
    *("SessionManagerPlugin is not found", ": not found", "command not found", "was not found", "gcloud auth login"),
)
# Opens it again when it breaks, and ends with whoever started it, even where that was killed: then the pipe to `cat` closes.
LOOP = "(while :; do {line}; sleep 1; done) </dev/null & cat >/dev/null; kill 0"


class NoForward(UserError):
    """Why the server is not reached from here."""


def line(stack: Stack) -> str | None:
    """The shell command that forwards the port; None where the server is not on a control node."""
    control = control_of(stack)
    return control.forward(stack) if control else None


@contextlib.contextmanager
def forwarded(stack: Stack, seconds: float = NEW_SECONDS, say: Callable[[str], object] = print) -> Iterator[None]:
    """The stack's server answers at flotilla:dstack.server while the block runs. Raises NoForward."""
    command = line(stack)
    if command is None or stack.dstack is None or answers(stack.dstack.server):
        yield
        return
    with opened(stack.dstack.server, command, seconds, say):
        yield


@contextlib.contextmanager
def opened(server: str, command: str, seconds: float, say: Callable[[str], object]) -> Iterator[None]:
    """Runs the shell command `command` until the block ends; begins once `server` answers. Raises NoForward."""
    say(f"$ {command}")
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            ["sh", "-c", LOOP.format(line=command)], stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
        )
        try:
            _wait(server, log, seconds, say)
            yield
        finally:
            _end(process)


def answers(server: str) -> bool:
    """Whether a dstack server answers there; never asked through a proxy."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{server.rstrip('/')}/healthcheck", timeout=ASK_SECONDS) as answer:
            return answer.status == 200
    except (OSError, ValueError, urllib.error.URLError):
        return False


def _wait(server: str, log: IO[bytes], seconds: float, say: Callable[[str], object]) -> None:
    begin = said = time.monotonic()
    while not answers(server):
        printed, now = _tail(log), time.monotonic()
        if hopeless := [text for text in printed if any(word in text for word in HOPELESS)]:
            raise NoForward(f"the control node is not reached: {hopeless[-1]}")
        last = f": {printed[-1]}" if printed else ""
        if now - begin > seconds:
            raise NoForward(f"{server} has not answered within {seconds:.0f} s of its forward{last}")
        if now - said > SAY_SECONDS:
            said = now
            say(f"waiting for the dstack server on the control node, {now - begin:.0f} s of {seconds:.0f}{last}")
        time.sleep(EVERY_SECONDS)


def _tail(log: IO[bytes]) -> list[str]:
    """The last lines; read beside the writer, whose place in the file is ours too."""
    size = os.fstat(log.fileno()).st_size
    text = os.pread(log.fileno(), TAIL, max(0, size - TAIL)).decode(errors="replace")
    return [words for words in map(str.strip, text.splitlines()) if words]


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin
    process.stdin.close()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
