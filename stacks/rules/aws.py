"""What AWS asks of a stack's settings, told before anything is created; what follows from machine types is in infra/aws/checks.py."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic_core import PydanticCustomError

from stacks.field_types import gigabytes, problem

if TYPE_CHECKING:
    from stacks.schema import Fleet, Stack

HEX = "([0-9a-f]{8}|[0-9a-f]{17})"  # what ends the ids of EC2
IMAGE, RESERVATION, SUBNET, VPC = (re.compile(f"{kind}-{HEX}") for kind in ("ami", "cr", "subnet", "vpc"))
PROVIDER = re.compile(r"arn:aws[a-z-]*:iam::\d{12}:oidc-provider/token\.actions\.githubusercontent\.com")
# MB/s per TB of PERSISTENT_2: https://docs.aws.amazon.com/fsx/latest/APIReference/API_CreateFileSystemLustreConfiguration.html
LUSTRE_THROUGHPUT = (125, 250, 500, 1000)
# Of a budget, less the one for the forecast: https://docs.aws.amazon.com/cost-management/latest/userguide/management-limits.html
NOTIFICATIONS = 4
ADDRESSES = 10  # of a notification


def faults(stack: Stack) -> Iterator[PydanticCustomError]:
    """What is wrong, the most basic first."""
    if stack.project is not None:
        yield problem("belongs to flotilla:cloud gcp, but that is aws; an AWS account comes from your credentials", "project")
    yield from _network(stack)
    for index, fleet in enumerate(stack.fleets):
        yield from _fleet(stack, fleet, index)
    if stack.checkpoints.kind == "lustre":
        yield from _lustre(stack)
    yield from _people(stack)


def _network(stack: Stack) -> Iterator[PydanticCustomError]:
    network = stack.network
    if not 16 <= network.cidr.prefixlen <= 24:
        text = f"{network.cidr} is a /{network.cidr.prefixlen}; take /16 to /24, which is cut into sixteen subnets"
        yield problem(text, "network", "cidr")
    if network.vpc and not VPC.fullmatch(network.vpc):
        yield problem(f"{network.vpc!r} is no id of a VPC; one is vpc-0123456789abcdef0", "network", "vpc")
    for index, subnet in enumerate(network.subnets):
        if not SUBNET.fullmatch(subnet):
            yield problem(f"{subnet!r} is no id of a subnet; one is subnet-0123456789abcdef0", "network", "subnets", index)
    if network.vpc and stack.access and stack.access.via == "bastion":
        yield problem("bastion needs a public subnet, but network.vpc lists private ones alone; take tunnel or direct", "access", "via")


def _fleet(stack: Stack, fleet: Fleet, index: int) -> Iterator[PydanticCustomError]:
    at = ("fleets", index)
    if fleet.image is not None and not IMAGE.fullmatch(fleet.image):
        yield problem(f"{fleet.image!r} is no id of an AMI; one is ami-0123456789abcdef0", *at, "image")
    if fleet.capacity.id is not None and not RESERVATION.fullmatch(fleet.capacity.id):
        yield problem(f"{fleet.capacity.id!r} is no id of a reservation or block; one is cr-0123456789abcdef0", *at, "capacity", "id")
    if fleet.capacity.kind == "block" and fleet.placement == "cluster":
        text = "cluster is not for a capacity block, whose machines stand side by side already; leave it out"
        yield problem(text, *at, "placement")
    if fleet.provision == "pulumi" and fleet.capacity.id and not stack.network.vpc and len(stack.network.zones) != 1:
        text = f"{list(stack.network.zones)}, but {fleet.capacity.id} is in one zone; name that alone"
        yield problem(text, "network", "zones")


def _lustre(stack: Stack) -> Iterator[PydanticCustomError]:
    size, throughput = gigabytes(stack.checkpoints.size or "0GB"), stack.checkpoints.throughput
    if size != 1200 and (size == 0 or size % 2400):
        yield problem(f"{stack.checkpoints.size!r} is refused by FSx; it takes 1200GB, or a multiple of 2400GB", "checkpoints", "size")
    if throughput is not None and throughput not in LUSTRE_THROUGHPUT:
        text = f"{throughput} is not one of {', '.join(map(str, LUSTRE_THROUGHPUT))} MB/s per TB"
        yield problem(text, "checkpoints", "throughput")
    for index, fleet in enumerate(stack.fleets):
        if fleet.provision == "dstack":
            text = "dstack, but checkpoints.kind lustre needs a Lustre client on the nodes, which dstack's image lacks; take pulumi"
            yield problem(text, "fleets", index, "provision")


def _people(stack: Stack) -> Iterator[PydanticCustomError]:
    """How one logs in, who is told, who deploys."""
    if stack.access and stack.access.public_key.startswith("ecdsa-"):
        yield problem("is an ECDSA key, which EC2 does not take; make one with `ssh-keygen -t ed25519`", "access", "public_key")
    if (budget := stack.budget) is not None:
        if budget.billing_account is not None:
            yield problem("belongs to flotilla:cloud gcp, but that is aws", "budget", "billing_account")
        if budget.currency != "USD":
            yield problem(f"{budget.currency}, but AWS counts in USD", "budget", "currency")
        if len(budget.thresholds) > NOTIFICATIONS:
            yield problem(f"{len(budget.thresholds)} thresholds, but a budget of AWS takes {NOTIFICATIONS}", "budget", "thresholds")
        if len(budget.emails) > ADDRESSES:
            yield problem(f"{len(budget.emails)} addresses, but a budget of AWS tells {ADDRESSES} at most", "budget", "emails")
    if stack.ci is not None and stack.ci.provider is not None and not PROVIDER.fullmatch(stack.ci.provider):
        text = f"{stack.ci.provider!r} is no provider; one is arn:aws:iam::<account>:oidc-provider/token.actions.githubusercontent.com"
        yield problem(text, "ci", "provider")
