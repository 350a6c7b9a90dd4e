"""What a stack names by paths of Google that is there already: networks, also of another project (Shared VPC), and file systems."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from pydantic_core import PydanticCustomError

from stacks.schema import Stack
from stacks.settings.fields import setting_error

NAME = r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?"
PROJECT = r"([a-z0-9.-]+:[a-z][a-z0-9-]{0,28}[a-z0-9]|[a-z][a-z0-9-]{4,28}[a-z0-9])"  # a domain's own: example.com:project
NETWORK = re.compile(rf"(projects/(?P<host>{PROJECT})/global/networks/)?(?P<name>{NAME})")
SUBNET = re.compile(rf"(projects/(?P<host>{PROJECT})/regions/(?P<region>[a-z0-9-]+)/subnetworks/)?(?P<name>{NAME})")
FILE_SYSTEM = re.compile(rf"(projects/(?P<project>{PROJECT})/)?locations/(?P<location>[a-z0-9-]+)/instances/(?P<name>{NAME})")


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


@dataclass(frozen=True)
class Network:
    """A network that is there already, with the subnet of the nodes, by their names; `project` has both, a host project's where shared."""

    project: str
    vpc: str
    subnet: str
    shared: bool

    @property
    def path(self) -> str:
        return f"projects/{self.project}/global/networks/{self.vpc}"


def network(stack: Stack) -> Network | None:
    """That of flotilla:network.vpc; None where the stack makes its own."""
    if not stack.network.vpc:
        return None
    vpc, subnet = NETWORK.fullmatch(stack.network.vpc), SUBNET.fullmatch(stack.network.subnets[0])
    assert vpc and subnet and stack.project  # shared_vpc
    project = vpc["host"] or stack.project
    return Network(project, vpc["name"], subnet["name"], project != stack.project)


def shared_vpc(stack: Stack) -> Iterator[PydanticCustomError]:
    """A network of the project, by its name, or of a host project, by its path; of the second Google takes less."""
    wanted = stack.network
    vpc = NETWORK.fullmatch(wanted.vpc or "")
    if wanted.vpc and not vpc:
        path = "a-z first, then a-z, 0-9 and -, or projects/<host project>/global/networks/<name>"
        yield setting_error(f"{wanted.vpc!r} is not the name of a network: {path}", "network", "vpc")
    host = vpc["host"] if vpc and vpc["host"] != stack.project else None
    if wanted.host_rules and not host:
        text = "belongs to a Shared VPC, but network.vpc is not projects/<host project>/global/networks/<name>"
        yield setting_error(text, "network", "host_rules")
    for index, subnet in enumerate(wanted.subnets):
        yield from _subnet(stack, vpc["host"] if vpc else None, subnet, index)
    if host is None:
        return
    if stack.access and stack.access.via == "bastion":
        text = f"bastion has a public address and a rule of its own, which {host} has to give; take tunnel or direct"
        yield setting_error(text, "access", "via")
    if stack.checkpoints.kind == "filestore" and not stack.checkpoints.file_system:
        text = f"filestore is made in a Shared VPC by private services access, which {host} has to give; name one of yours in file_system"
        yield setting_error(text, "checkpoints", "kind")


def _subnet(stack: Stack, host: str | None, subnet: str, index: int) -> Iterator[PydanticCustomError]:
    at, found = ("network", "subnets", index), SUBNET.fullmatch(subnet)
    if not found:
        text = f"{subnet!r} is not the name of a subnet, or projects/<host project>/regions/<region>/subnetworks/<name>"
        yield setting_error(text, *at)
    elif found["host"] and found["host"] != (host or stack.project):
        yield setting_error(f"{subnet!r} is of project {found['host']}, but network.vpc is of {host or stack.project}", *at)
    elif found["region"] and found["region"] != stack.region:
        yield setting_error(f"{subnet!r} is not in region {stack.region}", *at)
