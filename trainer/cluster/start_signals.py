"""SIGTERM while a run starts, before it looks for signals itself (trainer/cluster/stopping.py). Runs in the driver."""

from __future__ import annotations

import signal

ENDED: list[int] = []  # what ended a run that was starting


def end_by_sigterm() -> None:
    """From now on SIGTERM ends this process as an exception does, until somebody else takes the signal.

    Ray's own handler prints a stack of C++, aborts, and leaves Ray's processes behind.
    """

    def end(number: int, frame: object) -> None:
        ENDED.append(number)
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)
