"""The processes of `worker.py` as the run sees them: started, given answers, looked at, ended."""

from __future__ import annotations

import io
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import IO, Any

from trainer.episodes import Episode
from trainer.rewards.terms import Mistake, Scored
from trainer.rewards.worker import DONE, DUMP, Job

STDERR = 2
STACK_SECONDS = 5.0  # for a process to write where it hangs; one that the kernel holds never does
ENDED_SECONDS = 30.0  # from the end of its channel to that of the process
LINE = re.compile(r'File "(.+)", line (\d+) in ')


class Process:
    """One process, and the answers that it owes."""

    def __init__(self, job: Job):
        self.channel, theirs = Pipe()
        self.marks, self.outcomes, self.stack = (tempfile.TemporaryFile() for _ in range(3))  # noqa: SIM115
        files = [theirs.fileno(), self.marks.fileno(), self.outcomes.fileno(), self.stack.fileno()]
        # Not by multiprocessing, which would import the run's main module, and with it torch, into each of them.
        code = f"import sys; sys.path[:] = {sys.path!r}; from trainer.rewards.worker import serve; serve(*{files})"
        # A session of its own: what a reward started ends with it. What it prints is no output of the command, such as its --json.
        words = [sys.executable, "-uc", code]
        self.process = subprocess.Popen(
            words, pass_fds=files, stdin=subprocess.DEVNULL, stdout=STDERR, start_new_session=True, env=_environment()
        )
        theirs.close()
        self.channel.send(job)
        self.ready = False
        self.read = 0  # bytes of outcomes
        self.given: list[Episode] = []
        self.owed: dict[int, Episode] = {}  # of those, by position
        self.answers: tuple[list[Any], int] = [], 0
        self.seen: dict[int, tuple[int, float]] = {}  # how many times an answer was begun, and when that was noticed

    def give(self, episodes: list[Episode], answers: list[Any], step: int) -> None:
        """Have it score them, once it is ready."""
        self.given, self.owed, self.answers, self.seen = episodes, dict(enumerate(episodes)), (answers, step), {}
        if self.ready:
            self._send()

    def is_ready(self) -> None:
        self.ready = True
        if self.owed:
            self._send()

    def _send(self) -> None:
        for file in (self.marks, self.outcomes):
            os.lseek(file.fileno(), 0, os.SEEK_SET)  # for the process too, which waits
            os.ftruncate(file.fileno(), 0)
        self.read = 0
        with suppress(ConnectionError):  # it died since; how is read in place of its answer
            self.channel.send(self.answers)

    def ended(self) -> list[tuple[Episode, Scored | Mistake]]:
        """The answers that it has scored since it was last asked."""
        found, stream = [], io.BytesIO(_content(self.outcomes))
        stream.seek(self.read)
        with suppress(EOFError, pickle.UnpicklingError):  # the end, or one that it was ended in the midst of
            while True:
                position, outcome = pickle.load(stream)
                self.read = stream.tell()
                found.append((self.owed.pop(position), outcome))
        return found

    def begun(self) -> list[int]:
        """Positions of the answers that it has begun and not ended."""
        return list(self._tries())

    def late(self, seconds: float) -> list[int]:
        """Positions of the answers that have been at the same try for longer than this."""
        now = time.monotonic()
        self.seen = {i: was if (was := self.seen.get(i)) and was[0] == tried else (tried, now) for i, tried in self._tries().items()}
        return [i for i, (_, since) in self.seen.items() if now - since > seconds]

    def _tries(self) -> dict[int, int]:
        """How many times each answer that is begun and not ended was; of one look, as the process goes on meanwhile."""
        return {i: tried for i, tried in enumerate(_content(self.marks)) if 0 < tried < DONE and i in self.owed}

    def line(self) -> str:
        """Where its code is, such as "; my_rewards.py:7"; empty where it cannot say."""
        deadline = time.monotonic() + STACK_SECONDS
        os.kill(self.process.pid, DUMP)
        while not (found := LINE.search(_content(self.stack).decode(errors="replace"))):
            if time.monotonic() > deadline:
                return ""
            time.sleep(0.01)
        return f"; {Path(found[1]).name}:{found[2]}"

    def ending(self) -> str:
        code = self.process.wait(ENDED_SECONDS)
        return f"exit code {code}" if code >= 0 else signal.Signals(-code).name

    def end(self) -> None:
        self.channel.close()
        with suppress(ProcessLookupError):  # it has ended by itself
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for file in (self.marks, self.outcomes, self.stack):
            file.close()


def _content(file: IO[bytes]) -> bytes:
    """Of a file whose position another process shares."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0)


def _environment() -> dict[str, str] | None:
    """With the address of the cluster that the run is connected to, for a reward that has a process on it."""
    ray = sys.modules.get("ray")  # not imported for this
    if ray is None or not ray.is_initialized():
        return None
    return {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
