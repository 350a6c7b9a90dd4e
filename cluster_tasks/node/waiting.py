"""Waits that a signal ends and that say what they wait for."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from .errors import NOT_READY, Failure, Stopped
from .settings import Settings

signals: list[int] = []  # that have come, in order

log = logging.getLogger(__name__)


def wait(lacking: Callable[[], str | None], settings: Settings, deadline: float) -> None:
    """Until nothing is lacking; says what is, whenever that changes and every 10 s. Raises Failure at the deadline."""
    said, again = None, 0.0
    while line := lacking():
        now = time.monotonic()
        if now > deadline:
            raise Failure(NOT_READY, f"{line}: not within {settings.join_timeout} s (--join-timeout)")
        if line != said or now > again:
            said, again = line, now + 10
            log.info("%s, %.0f s left", line, deadline - now)
        pause(0.2)


def pause(seconds: float) -> None:
    """Sleeps between two looks; raises Stopped as soon as a signal has come."""
    deadline = time.monotonic() + seconds
    while not signals and (left := deadline - time.monotonic()) > 0:
        time.sleep(min(left, 0.2))
    if signals:
        raise Stopped
