"""Your own machines as a place: dstack reaches them over SSH."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic_core import PydanticCustomError

from stacks.places.place import Place
from stacks.schema import Stack
from stacks.settings.fields import setting_error


def _refused(stack: Stack) -> Iterator[PydanticCustomError]:
    for index, fleet in enumerate(stack.fleets):
        if fleet.ssh is None:
            yield setting_error("is missing; with flotilla:cloud ssh a fleet lists its hosts there", "fleets", index, "ssh")


PLACE = Place(
    name="ssh",
    program="infra.ssh",
    refused=_refused,
    checkpoints=("instance", "network", "shared"),
    settings=("fleets.ssh",),
)
