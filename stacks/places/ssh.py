"""Your own machines as a place: dstack reaches them over SSH."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic_core import PydanticCustomError

from stacks.places.place import Place
from stacks.schema import Fleet, Stack
from stacks.settings.fields import known, setting_error


def _refused(stack: Stack) -> Iterator[PydanticCustomError]:
    for index, fleet in enumerate(stack.fleets):
        if fleet.ssh is None:
            yield setting_error("is missing; with flotilla:cloud ssh a fleet lists its hosts there", "fleets", index, "ssh")
    yield from known(_hosts(stack))
    yield from known(_addresses(stack))


def _hosts(stack: Stack) -> Iterator[PydanticCustomError]:
    """A host is one node, of one fleet."""
    taken: dict[tuple[str, int], Fleet] = {}
    for index, fleet in enumerate(stack.fleets):
        for number, host in enumerate(fleet.ssh.hosts if fleet.ssh else ()):
            if (other := taken.setdefault(host.same, fleet)) is not fleet:
                text = f"{host.hostname!r} is listed twice, in fleet {other.name!r} too; a host is one node"
                yield setting_error(text, "fleets", index, "ssh", "hosts", number, "hostname")


def _addresses(stack: Stack) -> Iterator[PydanticCustomError]:
    """Of a cluster of several fleets, which to dstack are one."""
    if not {*stack.task.fleets} <= {fleet.name for fleet in stack.fleets}:
        return  # stacks/rules.py says so
    hosts = [
        (("fleets", stack.fleets.index(fleet), "ssh", "hosts", number, "internal_ip"), fleet, host.internal_ip)
        for fleet in stack.cluster_fleets()
        for number, host in enumerate(fleet.ssh.hosts if fleet.ssh else ())
    ]
    if len({fleet.name for _, fleet, _ in hosts}) < 2:
        return
    given, seen = {fleet.name for _, fleet, address in hosts if address}, dict[object, str]()
    for at, fleet, address in hosts:
        if address and seen.setdefault(address, fleet.name) != fleet.name:
            yield setting_error(f"{address} is another host's too, of fleet {seen[address]!r}", *at)
        elif not address and given and fleet.name not in given:
            text = f"is missing; dstack wants it of all hosts of a cluster or of none, and those of {', '.join(sorted(given))} have one"
            yield setting_error(text, *at)


PLACE = Place(
    name="ssh",
    program="infra.ssh",
    refused=_refused,
    checkpoints=("instance", "network", "shared"),
    settings=("fleets.ssh",),
)
