"""How the agent ends: its exit codes, and what is raised on the way to one."""

from __future__ import annotations

import logging

NODE_LOST, NOT_READY, RAY_FAILED, UNFIT = 75, 76, 77, 78

log = logging.getLogger(__name__)


class Failure(Exception):
    """Ends the agent with `code` and one line of explanation."""

    def __init__(self, code: int, message: str):
        super().__init__(message)
        self.code = code


class Reclaimed(Failure):
    """A cloud takes one of the machines back, but not yet: jobs can save."""


class HeadEnded(Exception):
    """The head has sent its shutdown notice."""


class Stopped(Exception):
    """A signal asked the agent to end."""


def say(text: str) -> None:
    """An error of one or more lines. Each gets rank and time: schedulers mix the output of all nodes."""
    for line in text.splitlines():
        log.error("%s", line)
