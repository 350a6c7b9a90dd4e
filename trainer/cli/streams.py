"""Where output goes that is not a command's own."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

STDOUT, STDERR = 1, 2


@contextmanager
def stdout_is_stderr() -> Iterator[None]:
    """Whatever prints inside, a person's module at its import or a process that is started, does so on stderr."""
    sys.stdout.flush()
    kept = os.dup(STDOUT)
    os.dup2(STDERR, STDOUT)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, STDOUT)
        os.close(kept)


@contextmanager
def ends_with_the_reader() -> Iterator[None]:
    """Exit code 141 without a traceback once nobody reads stdout, as in `flotilla plan ... | head -1`. As in stacks/host/reader.py."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        watched = select.poll()
        watched.register(sys.stdout.fileno(), 0)
        if not any(event & (select.POLLERR | select.POLLHUP) for _, event in watched.poll(0)):
            raise  # a connection broke, or another pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
        raise SystemExit(128 + signal.SIGPIPE) from None
