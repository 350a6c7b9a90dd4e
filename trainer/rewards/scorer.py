"""The run's side of its rewards: processes that compute them, deadlines, what happens where they fail, and errors that name the row."""

from __future__ import annotations

import dataclasses
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from multiprocessing.connection import wait
from threading import Lock
from typing import Any, Self

from trainer.cluster.spans import aside
from trainer.cluster.stopping import Stopped, Stopping
from trainer.configs.reward import RewardConfig
from trainer.episodes import Episode
from trainer.errors import ConfigError
from trainer.rewards import resolve_all
from trainer.rewards.processes import Process
from trainer.rewards.terms import Mistake, Scored, asked
from trainer.rewards.worker import Job

START_SECONDS = 300  # for a process to import the reward
STOP_SECONDS = 2.0  # that a batch still has once the run is asked to stop
POLL_SECONDS = 0.1  # between looks at deadlines
BLOCKED_SECONDS = 1.0  # for an async reward to end at reward.answer_timeout by itself; one that blocks its event loop does not


class Scorer:
    """Computes rewards in reward.workers processes. A context manager: leaving it ends them, busy or not.

    Raises ConfigError where the settings name no reward.
    """

    def __init__(self, config: RewardConfig, rows: Sequence[Mapping[str, Any]] = ()):
        """`rows`: of the data set; how their answers are read is printed once."""
        self.config = config
        self.reward = resolve_all(config.functions(), config.term_weights())
        self.job = Job(config.functions(), config.term_weights(), config.retries, config.answer_timeout)
        self.workers: list[Process] = []
        self.killed: Counter[int] = Counter()  # how often a process was ended, or ended itself, at an answer of this batch, by its id()
        self.failures: list[str] = []  # of this batch
        self.lost = ""  # what to say of them
        self.busy = Lock()  # an evaluation scores in a thread of its own
        self._start(rows)

    def _start(self, rows: Sequence[Mapping[str, Any]] = ()) -> None:
        first = Process(dataclasses.replace(self.job, rows=rows))
        self.workers = [first, *(Process(self.job) for _ in range(self.config.workers - 1))]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for worker in self.workers:
            worker.end()
        self.workers = []

    def score(self, episodes: list[Episode], step: int = 0, stopping: Stopping | None = None, *, whole: bool = True) -> list[float]:
        """Set each episode's reward, terms and whether it failed, and return the rewards; that of a failed one is 0.

        A reward fails where the function raises, ends its process, returns no finite number or does not end in time, and does so again
        reward.retries times. With reward.on_error=fail that raises ConfigError, or TimeoutError, naming the row of the data set and the
        line of code; with `drop` ConfigError is raised where all of a `whole` batch fail. Stopped is raised soon after `stopping` is set.
        """
        with self.busy, aside("rewards", "score", answers=len(episodes)):
            return self._score_all(episodes, step, stopping, whole)

    def _score_all(self, episodes: list[Episode], step: int, stopping: Stopping | None, whole: bool) -> list[float]:
        self.failures, self.lost = [], ""
        self._compute(episodes, step, stopping)
        if self.failures:
            count = f"{len(self.failures)} of {len(episodes)} rewards failed"
            if self.config.on_error == "drop" and whole and len(self.failures) == len(episodes):
                raise ConfigError(f"reward.on_error=drop: {count}; the first: {self.failures[0]}")
            self.lost = f"{count} (reward.on_error={self.config.on_error}); the first: {self.failures[0]}"
            print(f"step {step}: {self.lost}", flush=True)
        return [episode.reward for episode in episodes]

    def _compute(self, episodes: list[Episode], step: int, stopping: Stopping | None) -> None:
        self.killed.clear()
        if not self.workers:  # they were ended with the error of an earlier batch
            self._start()
        self._replace_dead()
        try:
            self._await_start(stopping)
            self._score(episodes, step, stopping)
        except BaseException:
            self.close()  # some may be at work still, and would answer the next batch with this one's rewards
            raise

    def _replace_dead(self) -> None:
        """Those that something ended while they had nothing to do: no answer of this batch is to blame."""
        for at, worker in enumerate(self.workers):
            if worker.ready and worker.process.poll() is not None:
                print(f"a process of the reward ended with {worker.ending()} between two batches; started again", flush=True)
                worker.end()
                self.workers[at] = Process(self.job)

    def _await_start(self, stopping: Stopping | None) -> None:
        deadline, asked_to_stop = time.monotonic() + START_SECONDS, _Patience(stopping)
        for worker in self.workers:
            while not worker.ready:
                asked_to_stop.check()
                if worker.channel.poll(POLL_SECONDS):
                    self._receive(worker)
                elif time.monotonic() > deadline:
                    line = worker.line()  # of what it imports
                    at = f"process {worker.process.pid} on {socket.gethostname()}{line}"
                    raise TimeoutError(f"{self._where([])} did not end within {START_SECONDS} s ({at})")

    def _score(self, episodes: list[Episode], step: int, stopping: Stopping | None) -> None:
        deadline, asked_to_stop = time.monotonic() + self.config.timeout, _Patience(stopping)
        for worker, part in zip(self.workers, deal(episodes, len(self.workers), whole_groups=self.reward.batched), strict=False):
            self._give(worker, part, step)
        while busy := {worker.channel: worker for worker in self.workers if worker.owed}:
            asked_to_stop.check()
            if time.monotonic() > deadline:
                for worker in busy.values():
                    self._end_late(worker)
                return
            for channel in wait(list(busy), max(0.0, min(POLL_SECONDS, deadline - time.monotonic()))):
                self._receive(busy[channel], step)  # type: ignore[index]
            if self.config.answer_timeout is not None:
                patience = self.config.answer_timeout + BLOCKED_SECONDS * self.reward.awaited
                for worker in [worker for worker in self.workers if worker.owed]:
                    self._take(worker)
                    if late := worker.late(patience):
                        text = f"did not end within {self.config.answer_timeout:g} s (reward.answer_timeout{self._line(worker)})"
                        self._replace(worker, late, Mistake(None, text, late=True), step)

    def _give(self, worker: Process, episodes: list[Episode], step: int) -> None:
        worker.give(episodes, self._answers(episodes, step), step)

    def _answers(self, episodes: list[Episode], step: int) -> list[Any]:
        """What the reward is called with."""
        return episodes if self.reward.batched else [(e.text, e.prompt.row, asked(self.reward.asks, e, step)) for e in episodes]

    def _receive(self, worker: Process, step: int = 0) -> None:
        """Take in what a worker has sent."""
        try:
            message = worker.channel.recv()
        except (EOFError, ConnectionError):
            self._take(worker)
            at = worker.begun()
            ended = Mistake(None, f"its process ended with {worker.ending()}", final=not worker.ready)
            self._replace(worker, at or [*worker.owed], ended, step)
            return
        if message == "ready":
            worker.is_ready()
        elif isinstance(message, list):
            print(*message, sep="\n", end="\n" * bool(message), flush=True)
        elif isinstance(message, Mistake):
            self._fail([*worker.owed.values()], message)
            worker.owed = {}
        else:
            self._take(worker)

    def _take(self, worker: Process) -> None:
        """The answers that it has scored."""
        for episode, outcome in worker.ended():
            if isinstance(outcome, Mistake):
                self._fail([episode], outcome)
            else:
                set_worth(episode, outcome)

    def _fail(self, episodes: list[Episode], mistake: Mistake) -> None:
        """For good. Raises where that ends the run."""
        colon = ":" if mistake.text.startswith("its ") else ""
        text = f"{self._where(episodes)}{colon} {mistake.text}"
        if mistake.final or self.config.on_error == "fail":
            raise TimeoutError(text) if mistake.late else ConfigError(text)
        for episode in episodes:
            set_worth(episode, (0.0, {}), failed=True)
        self.failures += [text] * len(episodes)

    def _replace(self, worker: Process, positions: list[int], mistake: Mistake, step: int) -> None:
        """End a process for what it does at these answers; another one tries them again, if they may be, and does the rest of its share."""
        stuck = [worker.owed.pop(i) for i in positions]
        self.killed.update(id(episode) for episode in stuck)
        given_up = [episode for episode in stuck if self.killed[id(episode)] > self.config.retries]
        if given_up or mistake.final:
            self._fail(given_up or stuck, mistake)
        rest = [*worker.owed.values(), *(episode for episode in stuck if self.killed[id(episode)] <= self.config.retries)]
        order = {id(episode): at for at, episode in enumerate(worker.given)}
        self.workers[self.workers.index(worker)] = fresh = Process(self.job)
        worker.end()
        self._give(fresh, sorted(rest, key=lambda episode: order[id(episode)]), step)

    def _end_late(self, worker: Process) -> None:
        """The batch has run out of time: fail what the worker owes."""
        self._take(worker)
        if worker.owed:  # else it was just in time, though nobody looked
            begun = [worker.owed[i] for i in worker.begun()]
            mistake = Mistake(None, f"did not end within {self.config.timeout:g} s (reward.timeout{self._line(worker)})", late=True)
            if self.config.on_error == "fail":
                self._fail(begun, mistake)
            self._fail([*worker.owed.values()], mistake)
        worker.end()
        self.workers[self.workers.index(worker)] = Process(self.job)

    def _line(self, worker: Process) -> str:
        return "" if self.reward.awaited else worker.line()  # an event loop that waits is in no line of the reward

    def _where(self, episodes: list[Episode]) -> str:
        """The reward and the answers that it was given."""
        name = f"reward.terms: {self.reward.name}" if self.config.terms else f"reward.function: {self.reward.name}"
        if not episodes:
            return f"{name}: starting its process"
        more = f" and {len(episodes) - 1} more" if episodes[1:] else ""
        return f"{name} on row {episodes[0].prompt.index} with the text {episodes[0].text[:80]!r}{more}"


class _Patience:
    """Raises Stopped once the run has been asked to stop for STOP_SECONDS."""

    def __init__(self, stopping: Stopping | None):
        self.stopping, self.since = stopping, 0.0

    def check(self) -> None:
        if not self.stopping:
            return
        self.since = self.since or time.monotonic()
        if time.monotonic() - self.since > STOP_SECONDS:
            raise Stopped(f"rewards did not end within {STOP_SECONDS:g} s of {self.stopping}")


def set_worth(episode: Episode, scored: Scored, *, failed: bool = False) -> None:
    (episode.reward, episode.terms), episode.failed = scored, failed


def deal(episodes: list[Episode], parts: int, *, whole_groups: bool) -> list[list[Episode]]:
    """At most `parts` equal shares, in order; with `whole_groups` all answers to one prompt are in the same one."""
    units = [list(unit) for _, unit in groupby(episodes, key=lambda e: e.group)] if whole_groups else [[e] for e in episodes]
    share = max(1, -(-len(units) // parts))
    return [[e for unit in units[i : i + share] for e in unit] for i in range(0, len(units), share)]
