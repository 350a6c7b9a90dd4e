"""The run's side of its rewards: processes that compute them, a deadline for each batch, and errors that name the row."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from itertools import groupby
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Any, Self

from trainer.configs.sections import RewardConfig
from trainer.episodes import Episode
from trainer.errors import ConfigError
from trainer.rewards import resolve
from trainer.rewards.worker import BEGUN, DUMP, Mistake

START_SECONDS = 300  # for a process to import the reward
STACK_SECONDS = 1.0  # for a process to write where it hangs; one that the kernel holds never does
LINE = re.compile(r'File "(.+)", line (\d+) in ')


class Scorer:
    """Computes rewards in reward.workers processes. A context manager: leaving it ends them, busy or not.

    Raises ConfigError where reward.function and reward.args name no reward.
    """

    def __init__(self, config: RewardConfig):
        self.config = config
        self.reward = resolve(config.function, config.args)
        self.workers: list[_Process] = []
        self._start()

    def _start(self) -> None:
        self.workers = [_Process(self.config) for _ in range(self.config.workers)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for worker in self.workers:
            worker.end()
        self.workers = []

    def score(self, episodes: list[Episode]) -> list[float]:
        """Set each episode's reward and return them all.

        Raises ConfigError naming the row of the data set, and the line of code, where the function raises, ends its process, or returns
        no finite number; TimeoutError, naming them too, where the batch is not done within reward.timeout seconds.
        """
        if not self.workers:  # they were ended with the error of an earlier batch
            self._start()
        try:
            self._await_start()
            deadline = time.monotonic() + self.config.timeout
            parts = deal(episodes, len(self.workers), whole_groups=self.reward.batched)
            busy = {worker.channel: (worker, part) for worker, part in zip(self.workers, parts, strict=False)}
            for worker, part in busy.values():
                worker.send([e if self.reward.batched else (e.text, e.prompt.row) for e in part])
            while busy:
                done = wait(list(busy), max(0.0, deadline - time.monotonic()))
                if not done:
                    raise self._late(*next(iter(busy.values())))
                for channel in done:
                    worker, part = busy.pop(channel)  # type: ignore[arg-type]
                    for episode, value in zip(part, self._receive(worker, part), strict=True):
                        episode.reward = value
        except BaseException:
            self.close()  # some may be at work still, and would answer the next batch with this one's rewards
            raise
        return [episode.reward for episode in episodes]

    def _await_start(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        for worker in self.workers:
            if not worker.ready:
                if not worker.channel.poll(max(0.0, deadline - time.monotonic())):
                    line = worker.line()  # of what it imports
                    at = f"process {worker.process.pid} on {socket.gethostname()}{line}"
                    raise TimeoutError(f"{self._where([], None)} did not end within {START_SECONDS} s ({at})")
                worker.ready = bool(self._receive(worker, []))

    def _receive(self, worker: _Process, part: list[Episode]) -> Any:
        """The message that a worker has sent about its share of the answers."""
        try:
            message = worker.channel.recv()
        except (EOFError, ConnectionError):
            raise ConfigError(f"{self._where(part, worker.begun() or None)}: its process ended with {worker.ending()}") from None
        if isinstance(message, Mistake):
            raise ConfigError(f"{self._where(part, None if message.position is None else [message.position])} {message.text}")
        return message

    def _late(self, worker: _Process, part: list[Episode]) -> TimeoutError:
        begun = worker.begun()
        line = "" if self.reward.awaited else worker.line()  # an event loop that waits is in no line of the reward
        return TimeoutError(f"{self._where(part, begun)} did not end within {self.config.timeout:g} s (reward.timeout{line})")

    def _where(self, part: list[Episode], positions: list[int] | None) -> str:
        """The reward and the answers that it was given, of those at `positions`, or all."""
        named = [part[i] for i in (range(len(part)) if positions is None else positions)]
        if not named:
            return f"reward.function: {self.reward.name}: starting its process"
        more = f" and {len(named) - 1} more" if named[1:] else ""
        return f"reward.function: {self.reward.name} on row {named[0].prompt.index} with the text {named[0].text[:80]!r}{more}"


def deal(episodes: list[Episode], parts: int, *, whole_groups: bool) -> list[list[Episode]]:
    """At most `parts` equal shares, in order; with `whole_groups` all answers to one prompt are in the same one."""
    units = [list(unit) for _, unit in groupby(episodes, key=lambda e: e.group)] if whole_groups else [[e] for e in episodes]
    share = max(1, -(-len(units) // parts))
    return [[e for unit in units[i : i + share] for e in unit] for i in range(0, len(units), share)]


class _Process:
    """One process of `worker.py`."""

    def __init__(self, config: RewardConfig):
        self.channel, theirs = Pipe()
        self.marks, self.stack = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        files = [theirs.fileno(), self.marks.fileno(), self.stack.fileno()]
        # Not by multiprocessing, which would import the run's main module, and with it torch, into each of them.
        code = f"import sys; sys.path[:] = {sys.path!r}; from trainer.rewards.worker import serve; serve(*{files})"
        # A session of its own: what a reward started ends with it.
        self.process = subprocess.Popen([sys.executable, "-uc", code], pass_fds=files, stdin=subprocess.DEVNULL, start_new_session=True)
        theirs.close()
        self.channel.send((config.function, config.args))
        self.ready = False

    def send(self, answers: list[Any]) -> None:
        with suppress(ConnectionError):  # it died since; how is read in place of its answer
            self.channel.send(answers)

    def begun(self) -> list[int]:
        """Positions of the answers that it has begun and not ended."""
        return [i for i, mark in enumerate(_content(self.marks)) if mark == BEGUN[0]]

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
        code = self.process.wait(STACK_SECONDS)
        return f"exit code {code}" if code >= 0 else signal.Signals(-code).name

    def end(self) -> None:
        self.channel.close()
        with suppress(ProcessLookupError):  # it has ended by itself
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.marks.close()
        self.stack.close()


def _content(file: IO[bytes]) -> bytes:
    """Of a file whose position another process shares."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0)
