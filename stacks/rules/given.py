"""What a stack names by paths of Google that is there already, and what is asked of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from pydantic_core import PydanticCustomError

from stacks.field_types import setting_error
from stacks.schema import Stack

FILE_SYSTEM = re.compile(
    r"(projects/(?P<project>[a-z0-9-]+)/)?locations/(?P<location>[a-z0-9-]+)/instances/(?P<name>[a-z]([a-z0-9-]{0,61}[a-z0-9])?)"
)


@dataclass(frozen=True)
class Share:
    """A Filestore instance that is there already."""

    project: str
    location: str
    name: str

    @property
    def path(self) -> str:
        return f"projects/{self.project}/locations/{self.location}/instances/{self.name}"


def share(stack: Stack) -> Share:
    """That of flotilla:checkpoints.file_system, in the stack's own project where it names no other."""
    found = FILE_SYSTEM.fullmatch(stack.checkpoints.file_system or "")
    assert found and stack.project  # asked by the caller; file_system
    return Share(found["project"] or stack.project, found["location"], found["name"])


def file_system(stack: Stack) -> Iterator[PydanticCustomError]:
    """One that is there already is reached from its own network alone: Google's peering with it is not passed on."""
    given, at = stack.checkpoints.file_system, ("checkpoints", "file_system")
    if given is None:
        return
    if not FILE_SYSTEM.fullmatch(given):
        path = "locations/us-central1-a/instances/<name>, or projects/<project>/locations/..."
        text = f"{given!r} is not a Filestore instance, such as {path}"
        yield setting_error(text, *at)
    elif not share(stack).location.startswith(stack.region or ""):
        yield setting_error(f"{given!r} is not in region {stack.region}", *at)
    if not stack.network.vpc:
        yield setting_error(f"{given!r} is out of reach of a new network; name its own in network.vpc", *at)
