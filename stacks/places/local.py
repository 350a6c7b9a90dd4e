"""This machine as a place: every node is a tree of its processes."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic_core import PydanticCustomError

from stacks.places.place import Place
from stacks.schema import Stack
from stacks.settings.fields import setting_error


def _refused(stack: Stack) -> Iterator[PydanticCustomError]:
    if stack.task.burn_in is not None:
        yield setting_error("is for machines that join, but with flotilla:cloud local all nodes are this one", "task", "burn_in")
    for index, fleet in enumerate(stack.fleets):
        if fleet.fabric is not None:
            yield setting_error("joins machines, but with flotilla:cloud local all nodes are this one", "fleets", index, "fabric")


PLACE = Place(
    name="local",
    program="infra.local",
    refused=_refused,
    checkpoints=("instance", "network", "shared"),
    remote=False,
    start="flotilla up, then flotilla submit",
)
