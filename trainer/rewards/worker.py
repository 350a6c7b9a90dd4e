"""A process that computes rewards, so that the run can end it whatever a reward does: wait forever, or loop in C holding Python's lock.

Started by `processes.py`, which sends lists of answers. Outcomes go to a file, one by one, so that those of a process that is ended are
not lost; a message says that the last one is there, or the first mistake.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

from trainer.rewards import load, readings, resolve_all
from trainer.rewards.terms import Mistake, Reward, Scored, mistake, worth

DONE = 255  # the byte of an answer in the file of marks; before that, how many times it was begun; 0 while nothing is done about it
DUMP = signal.SIGUSR2  # has the process write where it is
LONGEST_PAUSE = 5.0

Answers = list[Any]  # of text, row and what is asked for, or episodes for a batched reward


@dataclass(frozen=True)
class Job:
    """What a process is told when it starts."""

    functions: Mapping[str, tuple[str, dict[str, Any]]]
    weights: Mapping[str, float]
    retries: int
    answer_timeout: float | None
    rows: Sequence[Mapping[str, Any]] = ()  # of which the process says how it reads their answers


class Desk(Protocol):
    """Where answers stand, as the run sees it."""

    def mark(self, position: int, state: int) -> None: ...

    def end(self, position: int, outcome: Scored | Mistake) -> None: ...

    def fail(self, mistake: Mistake) -> None:
        """All of them."""
        ...


@dataclass
class Files:
    """A desk in files that the run's process reads."""

    channel: Connection
    marks: int  # file descriptors
    outcomes: int
    mistaken: bool = False

    def mark(self, position: int, state: int) -> None:
        os.pwrite(self.marks, bytes([state]), position)

    def end(self, position: int, outcome: Scored | Mistake) -> None:
        os.write(self.outcomes, pickle.dumps((position, outcome)))
        self.mark(position, DONE)
        if isinstance(outcome, Mistake) and not self.mistaken:
            self.mistaken = True
            self.channel.send("mistaken")

    def fail(self, mistake: Mistake) -> None:
        self.channel.send(mistake)


def serve(connection: int, marks: int, outcomes: int, stack: int) -> None:
    """Answer until the other end is closed. The arguments are file descriptors."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)  # the run acts on them; not SIG_IGN, which a reward's own processes would inherit
    _end_with_parent()
    faulthandler.register(DUMP, file=stack, all_threads=False)
    channel = Connection(connection)
    job: Job = channel.recv()
    reward = resolve_all(job.functions, job.weights)
    load(job.functions)
    channel.send(readings(job.functions, job.rows))
    channel.send("ready")
    with asyncio.Runner() as runner:  # one loop for all batches: what a reward keeps open, such as an HTTP session, belongs to its loop
        while True:
            try:
                answers, step = channel.recv()
            except (EOFError, ConnectionError):  # the run has ended with something of ours unread
                return
            compute(reward, answers, step, job, Files(channel, marks, outcomes), runner.run)
            channel.send("done")


def compute(reward: Reward, answers: Answers, step: int, job: Job, desk: Desk, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
    """Tell the desk what each answer is worth."""
    if reward.batched:
        _batched(reward, answers, step, job, desk, run)
    elif reward.awaited:
        run(_awaited(reward, answers, job, desk))
    else:
        for i, (text, row, given) in enumerate(answers):
            desk.end(i, _plain(reward, i, lambda t=text, r=row, g=given: reward.function(t, r, **g), job, desk))


def _plain(reward: Reward, i: int, call: Callable[[], Any], job: Job, desk: Desk) -> Scored | Mistake:
    for tried in range(1, job.retries + 2):
        desk.mark(i, tried)
        try:
            return worth(reward, call(), i)
        except Exception as error:
            failed = mistake(error, i)
        if failed.final or tried > job.retries:
            return failed
        desk.mark(i, 0)
        time.sleep(pause(tried))
    raise AssertionError("it was tried once at least")


async def _awaited(reward: Reward, answers: Answers, job: Job, desk: Desk) -> None:
    async def of(i: int, text: str, row: dict[str, Any], given: dict[str, Any]) -> None:
        for tried in range(1, job.retries + 2):
            desk.mark(i, tried)
            limit = asyncio.timeout(job.answer_timeout)
            try:
                async with limit:
                    value = await reward.function(text, row, **given)
                return desk.end(i, worth(reward, value, i))
            except Exception as error:
                failed = _late(i, job) if limit.expired() else mistake(error, i)
            if failed.final or tried > job.retries:
                return desk.end(i, failed)
            desk.mark(i, 0)
            await asyncio.sleep(pause(tried))

    await asyncio.gather(*(of(i, *answer) for i, answer in enumerate(answers)))


def _batched(reward: Reward, answers: Answers, step: int, job: Job, desk: Desk, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
    given = dict.fromkeys(reward.asks, step)

    async def limited() -> Any:
        limit = asyncio.timeout(job.answer_timeout)
        try:
            async with limit:
                return await reward.function(answers, **given)
        except TimeoutError:
            if limit.expired():
                raise _late(None, job) from None
            raise

    for tried in range(1, job.retries + 2):
        for i in range(len(answers)):
            desk.mark(i, tried)
        try:
            values = list(run(limited()) if reward.awaited else reward.function(answers, **given))
            if len(values) != len(answers):
                raise Mistake(None, f"returned {len(values)} rewards for {len(answers)} episodes")
        except Exception as error:
            failed = mistake(error, None)
            if not failed.final and tried <= job.retries:
                for i in range(len(answers)):
                    desk.mark(i, 0)
                time.sleep(pause(tried))
                continue
            desk.fail(failed)
            return
        for i, value in enumerate(values):
            try:
                desk.end(i, worth(reward, value, i))
            except Mistake as wrong:
                desk.end(i, wrong)
        return


def pause(tried: int) -> float:
    """Seconds before the next try."""
    return min(0.1 * 2 ** (tried - 1), LONGEST_PAUSE)


def _late(position: int | None, job: Job) -> Mistake:
    return Mistake(position, f"did not end within {job.answer_timeout:g} s (reward.answer_timeout)", late=True)


def _end_with_parent() -> None:
    """Also where the run is killed while a reward hangs. Elsewhere than on Linux the process ends when it next reads."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
