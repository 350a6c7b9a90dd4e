"""Errors that a person fixes, and those that end a run which a program broke."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from types import TracebackType

STOPPED = 143  # the exit code of a run that was asked to stop: 128 + SIGTERM
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class ConfigError(ValueError):
    """An error in settings, paths or data that a person can fix. One line per error; trainer.cli.exits_cleanly makes it exit code 2."""


class RunError(RuntimeError):
    """The run cannot continue: a process died or did not answer. The same submit resumes from the last complete checkpoint."""


def reasons(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it was raised from; Ray keeps what happened in another process in `cause`."""
    while isinstance(error, BaseException):
        yield error
        error = getattr(error, "cause", None) or error.__cause__


def said(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """As sys.excepthook: Ctrl-C is one line, not the traceback of whatever was running."""
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)
