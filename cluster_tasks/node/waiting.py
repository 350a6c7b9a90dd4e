"""Waits that say what they wait for and have a deadline; the agent's own also end with a signal."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from .errors import NOT_READY, Failure, Stopped

REPEAT_SECONDS = 10  # after which the agent says again what it waits for
signals: list[int] = []  # that have come, in order

log = logging.getLogger(__name__)


def wait_until(
    missing: Callable[[], str | None],
    deadline: float,
    say: Callable[[str], None],
    *,
    sleep: Callable[[float], None] = time.sleep,
    every: float = 0.2,
    repeat: float = float("inf"),
) -> str | None:
    """Until nothing is missing: None; at the deadline, on the monotonic clock, what still is.

    Says what is missing when that changes, and again after `repeat` seconds.
    """
    said, again = None, 0.0
    while line := missing():
        now = time.monotonic()
        if now > deadline:
            return line
        if line != said or now > again:
            said, again = line, now + repeat
            say(line)
        sleep(every)
    return None


class Patience(Protocol):
    """Of the settings, what a wait needs."""

    join_timeout: int


def wait(missing: Callable[[], str | None], settings: Patience, deadline: float) -> None:
    """As the agent waits. Raises Failure at the deadline, Stopped at a signal."""

    def say(line: str) -> None:
        log.info("%s, %.0f s left", line, deadline - time.monotonic())

    if line := wait_until(missing, deadline, say, sleep=pause, repeat=REPEAT_SECONDS):
        raise Failure(NOT_READY, f"{line}: not within {settings.join_timeout} s (--join-timeout)")


def pause(seconds: float) -> None:
    """Sleeps between two looks; raises Stopped as soon as a signal has come."""
    deadline = time.monotonic() + seconds
    while not signals and (left := deadline - time.monotonic()) > 0:
        time.sleep(min(left, 0.2))
    if signals:
        raise Stopped
