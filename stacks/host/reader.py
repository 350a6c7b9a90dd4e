"""How a command ends when the program that reads its output has ended, as in `flotilla ... | head -1`."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

CODE = 128 + signal.SIGPIPE


@contextmanager
def ends_with_the_reader() -> Iterator[None]:
    """Exit code 141 without a traceback once nobody reads stdout, as other programs end. Broken connections raise as before."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not nobody_reads(sys.stdout.fileno()):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
        raise SystemExit(CODE) from None


def nobody_reads(descriptor: int) -> bool:
    """Whether the other end of a pipe is closed."""
    watched = select.poll()
    watched.register(descriptor, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in watched.poll(0))
