"""A process that computes rewards, so that the run can end it whatever a reward does: wait forever, or loop in C holding Python's lock.

Started by `scorer.py`, which sends lists of answers and gets back a list of floats, or a `Mistake`.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from trainer.rewards import Reward, resolve

BEGUN, DONE = b"\1", b"\2"  # the byte of an answer in the file of marks
DUMP = signal.SIGUSR2  # has the process write where it is

Answers = list[Any]  # pairs of text and row, or episodes for a batched reward
Mark = Callable[[int, bytes], object]


@dataclass
class Mistake(Exception):
    """What a reward did wrong, and on which of the answers; None where it was called with all of them."""

    position: int | None
    text: str


def serve(connection: int, marks: int, stack: int) -> None:
    """Answer until the other end is closed. The arguments are file descriptors."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)  # the run acts on them; not SIG_IGN, which a reward's own processes would inherit
    _end_with_parent()
    faulthandler.register(DUMP, file=stack, all_threads=False)
    channel = Connection(connection)
    reward = resolve(*channel.recv())
    channel.send("ready")
    with asyncio.Runner() as runner:  # one loop for all batches: what a reward keeps open, such as an HTTP session, belongs to its loop
        while True:
            try:
                answers = channel.recv()
            except EOFError:
                return
            os.ftruncate(marks, 0)
            try:
                channel.send(compute(reward, answers, lambda i, mark: os.pwrite(marks, mark, i), runner.run))
            except Mistake as mistake:
                channel.send(mistake)


def compute(reward: Reward, answers: Answers, mark: Mark, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> list[float]:
    """Rewards of the answers, in their order. `mark` is told which have begun and ended. Raises Mistake."""
    if reward.batched:
        return _batched(reward, answers, mark, run)
    if reward.awaited:
        return run(_awaited(reward, answers, mark))
    values = []
    for i, (text, row) in enumerate(answers):
        mark(i, BEGUN)
        try:
            values.append(_number(reward.function(text, row), i))
        except Exception as error:
            raise _mistake(error, i) from error
        mark(i, DONE)
    return values


def _batched(reward: Reward, answers: Answers, mark: Mark, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> list[float]:
    for i in range(len(answers)):
        mark(i, BEGUN)
    try:
        values = list(run(reward.function(answers)) if reward.awaited else reward.function(answers))
    except Exception as error:
        raise _mistake(error, None) from error
    if len(values) != len(answers):
        raise Mistake(None, f"returned {len(values)} rewards for {len(answers)} episodes")
    return [_number(value, i) for i, value in enumerate(values)]


async def _awaited(reward: Reward, answers: Answers, mark: Mark) -> list[float]:
    async def reward_of(i: int, text: str, row: dict[str, Any]) -> float:
        mark(i, BEGUN)
        try:
            value = _number(await reward.function(text, row), i)
        except Exception as error:
            raise _mistake(error, i) from error
        mark(i, DONE)
        return value

    tasks = [asyncio.create_task(reward_of(i, text, row)) for i, (text, row) in enumerate(answers)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _mistake(error: Exception, position: int | None) -> Mistake:
    if isinstance(error, Mistake):
        return error
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return Mistake(position, f"raised {error!r} ({Path(frame.filename).name}:{frame.lineno})")


def _number(reward: Any, position: int) -> float:
    try:
        value = float(reward)
    except (TypeError, ValueError) as error:
        raise Mistake(position, f"returned {reward!r}, which is not a number") from error
    if not math.isfinite(value):
        raise Mistake(position, f"returned {value}; a reward is finite")
    return value


def _end_with_parent() -> None:
    """Also where the run is killed while a reward hangs. Elsewhere than on Linux the process ends when it next reads."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
