"""How labs, and the tests and benchmarks in them, wait."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TypeVar

from cluster_tasks.node.waiting import wait_until

T = TypeVar("T")


def wait_for(what: str, check: Callable[[], T], timeout: float, every: float = 0.2) -> T:
    """The first true answer of `check`; an OSError is none. Raises TimeoutError."""
    answers: list[T] = []

    def missing() -> str | None:
        with contextlib.suppress(OSError):
            if answer := check():
                answers.append(answer)
        return None if answers else what

    if wait_until(missing, time.monotonic() + timeout, lambda _: None, every=every):
        raise TimeoutError(f"{what}: not within {timeout} s")
    return answers[0]
