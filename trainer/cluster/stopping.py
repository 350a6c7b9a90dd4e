"""Asked to stop, a run finishes its step, saves, and ends with code 143 (128 + SIGTERM)."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class Stopped(Exception):
    """Raised out of a wait that went on after the run was asked to stop."""


class Stopping:
    """False until a signal asks to stop; then it knows which."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    def __str__(self) -> str:
        return self.signal.name if self.signal else "nothing"


@contextmanager
def stop_signals() -> Iterator[Stopping]:
    """SIGTERM (`ray job stop`, Kubernetes, Slurm), SIGUSR1 (Slurm's notice) and SIGINT set the flag; a second SIGINT interrupts."""
    stopping = Stopping()

    def ask(number: int, frame: object) -> None:
        if stopping and number == signal.SIGINT:
            raise KeyboardInterrupt
        stopping.signal = signal.Signals(number)

    old = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    try:
        yield stopping
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
