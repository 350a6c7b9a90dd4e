"""What a person did, against what a program did."""

from __future__ import annotations

import errno
from collections.abc import Iterator

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class ConfigError(ValueError):
    """An error in settings, paths or data that a person can fix. One line per error; trainer.cli.exits_cleanly makes it exit code 2."""


def reasons(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it was raised from; Ray keeps what happened in another process in `cause`."""
    while isinstance(error, BaseException):
        yield error
        error = getattr(error, "cause", None) or error.__cause__
