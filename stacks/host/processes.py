"""A process that was started here, found again by its id and by a variable of its environment."""

from __future__ import annotations

import time

import psutil

EXEC_SECONDS = 2  # what a program may take from exec to its environment


def find(pid: int, variable: str, value: str) -> psutil.Process | None:
    """The process, or None when it has ended. The variable tells it from a later process with the same id.

    For an instant after exec, /proc shows an empty environment: Popen has returned by then, so that is no answer yet.
    """
    deadline = time.monotonic() + EXEC_SECONDS
    try:
        process = psutil.Process(pid)
        while process.status() != psutil.STATUS_ZOMBIE:
            environment = process.environ()
            if environment or time.monotonic() > deadline:
                return process if environment.get(variable) == value else None
            time.sleep(0.01)
    except psutil.Error:
        pass
    return None
