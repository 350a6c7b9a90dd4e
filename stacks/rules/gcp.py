"""What GCP asks of a stack's settings, told before anything is created; what follows from machine types is in infra/gcp/checks.py."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic_core import PydanticCustomError

from stacks.field_types import gigabytes, problem

if TYPE_CHECKING:
    from stacks.schema import Fleet, Stack

BILLING_ACCOUNT = re.compile(r"[0-9A-F]{6}-[0-9A-F]{6}-[0-9A-F]{6}")
IMAGE = re.compile(r"projects/[a-z0-9.:-]+/global/images/(family/)?[a-z][a-z0-9-]*")
NETWORK = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
POOL = re.compile(r"projects/\d+/locations/global/workloadIdentityPools/[a-z0-9-]{4,32}")
RESERVATION = re.compile(r"(projects/[a-z0-9-]+/reservations/)?[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
SOFT_DELETE = range(7, 91)  # days: https://docs.cloud.google.com/storage/docs/soft-delete
CHANNELS = 5  # of a budget: https://docs.cloud.google.com/billing/docs/how-to/budgets-notification-recipients


def faults(stack: Stack) -> Iterator[PydanticCustomError]:
    """What is wrong, the most basic first."""
    if stack.project is None:
        yield problem("is missing; with flotilla:cloud gcp it is the id of your GCP project", "project")
    if stack.account_defaults:
        yield problem("belongs to flotilla:cloud aws; GCP encrypts every disk by itself", "account_defaults")
    yield from _network(stack)
    for index, fleet in enumerate(stack.fleets):
        yield from _fleet(stack, fleet, index)
    yield from _checkpoints(stack)
    yield from _people(stack)


def _network(stack: Stack) -> Iterator[PydanticCustomError]:
    network = stack.network
    if network.nat == "per-zone":
        yield problem(
            "per-zone belongs to flotilla:cloud aws; Cloud NAT serves all zones of a region (allowed here: one)", "network", "nat"
        )
    if not 8 <= network.cidr.prefixlen <= 22:
        text = f"{network.cidr} is a /{network.cidr.prefixlen}; take /8 to /22, which is cut into the subnets of nodes and fabric"
        yield problem(text, "network", "cidr")
    if network.vpc and not NETWORK.fullmatch(network.vpc):
        yield problem(f"{network.vpc!r} is not the name of a network: a-z first, then a-z, 0-9 and -", "network", "vpc")
    if len(network.subnets) > 1:
        yield problem(f"{len(network.subnets)} subnets, but nodes of a region share one; name it alone", "network", "subnets")


def _fleet(stack: Stack, fleet: Fleet, index: int) -> Iterator[PydanticCustomError]:
    at = ("fleets", index)
    if fleet.nics is not None:
        yield problem("belongs to flotilla:cloud aws; on GCP the interfaces follow from the machine type", *at, "nics")
    if fleet.image is not None and not IMAGE.fullmatch(fleet.image):
        yield problem(f"{fleet.image!r} is no image; one is projects/<project>/global/images/<name>, or .../family/<name>", *at, "image")
    if fleet.capacity.id is not None and not RESERVATION.fullmatch(fleet.capacity.id):
        text = f"{fleet.capacity.id!r} is no reservation; it is a name, or projects/<project>/reservations/<name>"
        yield problem(text, *at, "capacity", "id")
    if fleet.provision == "pulumi" and len(stack.network.zones) != 1:
        text = f"{list(stack.network.zones)}, but machines that Pulumi launches stand in one zone; name the one that has {fleet.machine}"
        yield problem(text, "network", "zones")


def _checkpoints(stack: Stack) -> Iterator[PydanticCustomError]:
    checkpoints = stack.checkpoints
    if checkpoints.kind == "bucket" and checkpoints.keep_days not in SOFT_DELETE:
        yield problem(f"{checkpoints.keep_days} days, but GCS keeps what was deleted for 7 to 90", "checkpoints", "keep_days")
    if checkpoints.kind == "filestore":
        size = gigabytes(checkpoints.size or "0GB")
        step = 256 if size < 10240 else 2560  # https://docs.cloud.google.com/filestore/docs/service-tiers
        if not 1024 <= size <= 102400 or size % step:
            text = f"{checkpoints.size!r} is refused by Filestore; it takes 1TB to 9.75TB by steps of 256GB, 10TB to 100TB by 2.5TB"
            yield problem(text, "checkpoints", "size")
    if checkpoints.kind == "hyperdisk-ml":
        for index, fleet in enumerate(stack.fleets):
            if fleet.provision == "dstack":
                text = "dstack, but checkpoints.kind hyperdisk-ml is a disk that Pulumi attaches; take pulumi"
                yield problem(text, "fleets", index, "provision")
        if (nodes := sum(fleet.nodes for fleet in stack.fleets)) > 1:
            text = f"hyperdisk-ml is written by one node alone, but the fleets have {nodes} (allowed: bucket, filestore)"
            yield problem(text, "checkpoints", "kind")


def _people(stack: Stack) -> Iterator[PydanticCustomError]:
    """Who pays, who is told, who deploys."""
    if (budget := stack.budget) is not None:
        if budget.billing_account is None:
            yield problem(
                "is missing; a budget of GCP belongs to a billing account such as 012345-6789AB-CDEF01", "budget", "billing_account"
            )
        elif not BILLING_ACCOUNT.fullmatch(budget.billing_account):
            text = f"{budget.billing_account!r} is no billing account; one is 012345-6789AB-CDEF01"
            yield problem(text, "budget", "billing_account")
        if len(budget.emails) > CHANNELS:
            yield problem(f"{len(budget.emails)} addresses, but a budget of GCP tells {CHANNELS} at most", "budget", "emails")
    if stack.ci is not None and stack.ci.provider is not None and not POOL.fullmatch(stack.ci.provider):
        text = f"{stack.ci.provider!r} is no pool; one is projects/<number>/locations/global/workloadIdentityPools/<id>"
        yield problem(text, "ci", "provider")
