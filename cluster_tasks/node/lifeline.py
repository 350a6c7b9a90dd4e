"""In a container: its client holds standard input open. When that ends, whatever ended the client, so does the container.

Docker and Podman leave a container behind whose client was killed, and with it the GPUs in its hands. As pid 1 of the container the
process that watches takes all others along.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

from .errors import NODE_LOST

LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
FLAG = "--end-with-stdin"
HANDED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def live_while_stdin_is_open() -> None:
    """Returns in a child. Its parent hands on signals, and ends with the child's code, or with standard input."""
    # Held back until the parent can hand them on: one that comes before that would end the parent, and leave the child behind.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, HANDED_ON)
    if (child := os.fork()) == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        return
    for number in HANDED_ON:
        signal.signal(number, lambda number, _: os.kill(child, number))
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    while True:
        ended, status = os.wait()  # of others too: pid 1 inherits the orphans of its container
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def _end_with_stdin() -> None:
    while os.read(0, 4096):
        pass
    print("node: the container's client has ended, and so does the container", flush=True)
    os._exit(NODE_LOST)


def die_with_parent() -> None:
    """In a child, between fork and exec: it is killed when the thread that started it ends, however that does."""
    if LIBC is not None:
        LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
