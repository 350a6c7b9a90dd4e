"""The places where clusters run; each is imported when it is asked for, as each needs packages that the others do not."""

from __future__ import annotations

from cli.places.protocol import Place
from stacks.schema import Stack


def place(stack: Stack) -> Place:
    """Raises ModuleNotFoundError where what the place needs is not installed."""
    if stack.cloud == "local":
        from cli.places import local

        return local
    if stack.cloud == "slurm":
        from cli.places import slurm

        return slurm
    from cli.places import dstack

    return dstack
