"""A command that two people, or two shells, may start at once."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from stacks.errors import UserError


@contextlib.contextmanager
def one_at_a_time(file: Path, busy: UserError) -> Iterator[None]:
    """Holds a lock on `file`, which is made; it ends with this process. Raises `busy` where another has it."""
    with file.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise busy from None
        yield
