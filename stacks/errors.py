"""Errors that a person made, or can fix: every command shows their text without a traceback and ends with exit code 2 or the error's own.

The trainer and the node agent have their own, since they are shipped alone (`trainer.errors.ConfigError`, `cluster_tasks.node.errors`).
"""


class UserError(ValueError):
    """Its text is all that a person needs to fix it: the setting, its value, what is allowed, where it was read."""


def first_line(error: BaseException) -> str:
    """Of its text; its type where that is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class StackError(UserError):
    """Errors in a stack file, one on each line."""
