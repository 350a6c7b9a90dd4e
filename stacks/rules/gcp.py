"""GCP as a place: its machine types, and what it asks of a stack's settings; what follows from fabrics is in infra/gcp/checks.py.

Sources of the figures:
https://docs.cloud.google.com/compute/docs/accelerator-optimized-machines (machine types, what each may be bought as)
https://docs.cloud.google.com/compute/docs/gpus/gpu-network-bandwidth (network interfaces and their bandwidth)
https://docs.cloud.google.com/cluster-toolkit/docs/machine-learning/a3-mega-enable-gpudirect-tcpxo (networks, MTU)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

from pydantic_core import PydanticCustomError

from stacks.field_types import gigabytes, setting_error
from stacks.machines import Machine
from stacks.rules.place import CLOUD_SETTINGS, Cloud, Place
from stacks.schema import Fleet, Stack

BILLING_ACCOUNT = re.compile(r"[0-9A-F]{6}-[0-9A-F]{6}-[0-9A-F]{6}")
IMAGE = re.compile(r"projects/[a-z0-9.:-]+/global/images/(family/)?[a-z][a-z0-9-]*")
NETWORK = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
POOL = re.compile(r"projects/\d+/locations/global/workloadIdentityPools/[a-z0-9-]{4,32}")
RESERVATION = re.compile(r"(projects/[a-z0-9-]+/reservations/)?[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
SOFT_DELETE = range(7, 91)  # days: https://docs.cloud.google.com/storage/docs/soft-delete
CHANNELS = 5  # of a budget: https://docs.cloud.google.com/billing/docs/how-to/budgets-notification-recipients


def _errors(stack: Stack) -> Iterator[PydanticCustomError]:
    """The most basic first."""
    if stack.project is None:
        yield setting_error("is missing; with flotilla:cloud gcp it is the id of your GCP project", "project")
    yield from _network(stack)
    for index, fleet in enumerate(stack.fleets):
        yield from _fleet(stack, fleet, index)
    yield from _checkpoints(stack)
    yield from _people(stack)


def _network(stack: Stack) -> Iterator[PydanticCustomError]:
    network = stack.network
    if network.nat == "per-zone":
        text = "per-zone is not on flotilla:cloud gcp, whose Cloud NAT serves all zones of a region (allowed here: one)"
        yield setting_error(text, "network", "nat")
    if not 8 <= network.cidr.prefixlen <= 22:
        text = f"{network.cidr} is a /{network.cidr.prefixlen}; take /8 to /22, which is cut into the subnets of nodes and fabric"
        yield setting_error(text, "network", "cidr")
    if network.vpc and not NETWORK.fullmatch(network.vpc):
        yield setting_error(f"{network.vpc!r} is not the name of a network: a-z first, then a-z, 0-9 and -", "network", "vpc")
    if len(network.subnets) > 1:
        yield setting_error(f"{len(network.subnets)} subnets, but nodes of a region share one; name it alone", "network", "subnets")


def _fleet(stack: Stack, fleet: Fleet, index: int) -> Iterator[PydanticCustomError]:
    at = ("fleets", index)
    if fleet.image is not None and not IMAGE.fullmatch(fleet.image):
        yield setting_error(
            f"{fleet.image!r} is not a valid image, such as projects/<project>/global/images/<name>, or .../family/<name>", *at, "image"
        )
    if fleet.capacity.id is not None and not RESERVATION.fullmatch(fleet.capacity.id):
        text = f"{fleet.capacity.id!r} is not a valid reservation: a name, or projects/<project>/reservations/<name>"
        yield setting_error(text, *at, "capacity", "id")
    if fleet.provision == "pulumi" and len(stack.network.zones) != 1:
        text = f"{list(stack.network.zones)}, but machines that Pulumi launches stand in one zone; name the one that has {fleet.machine}"
        yield setting_error(text, "network", "zones")


def _checkpoints(stack: Stack) -> Iterator[PydanticCustomError]:
    checkpoints = stack.checkpoints
    if checkpoints.kind == "bucket" and checkpoints.keep_days not in SOFT_DELETE:
        yield setting_error(f"{checkpoints.keep_days} days, but GCS keeps what was deleted for 7 to 90", "checkpoints", "keep_days")
    if checkpoints.kind == "filestore":
        size = gigabytes(checkpoints.size or "0GB")
        step = 256 if size < 10240 else 2560  # https://docs.cloud.google.com/filestore/docs/service-tiers
        if not 1024 <= size <= 102400 or size % step:
            text = f"{checkpoints.size!r} is refused by Filestore; it takes 1TB to 9.75TB by steps of 256GB, 10TB to 100TB by 2.5TB"
            yield setting_error(text, "checkpoints", "size")
    if checkpoints.kind == "hyperdisk-ml":
        for index, fleet in enumerate(stack.fleets):
            if fleet.provision == "dstack":
                text = "dstack, but checkpoints.kind hyperdisk-ml is a disk that Pulumi attaches; take pulumi"
                yield setting_error(text, "fleets", index, "provision")
        if (nodes := sum(fleet.nodes for fleet in stack.fleets)) > 1:
            text = f"hyperdisk-ml is written by one node alone, but the fleets have {nodes} (allowed: bucket, filestore)"
            yield setting_error(text, "checkpoints", "kind")


def _people(stack: Stack) -> Iterator[PydanticCustomError]:
    """Who pays, who gets mail, who deploys."""
    if (budget := stack.budget) is not None:
        if budget.billing_account is None:
            yield setting_error(
                "is missing; a budget of GCP belongs to a billing account such as 012345-6789AB-CDEF01", "budget", "billing_account"
            )
        elif not BILLING_ACCOUNT.fullmatch(budget.billing_account):
            text = f"{budget.billing_account!r} is not a valid billing account, such as 012345-6789AB-CDEF01"
            yield setting_error(text, "budget", "billing_account")
        if len(budget.emails) > CHANNELS:
            yield setting_error(f"{len(budget.emails)} addresses, but a budget of GCP mails {CHANNELS} at most", "budget", "emails")
    if stack.ci is not None and stack.ci.provider is not None and not POOL.fullmatch(stack.ci.provider):
        text = f"{stack.ci.provider!r} is not a valid pool, such as projects/<number>/locations/global/workloadIdentityPools/<id>"
        yield setting_error(text, "ci", "provider")


_machine = partial(Machine, "gcp")

# fmt: off
MACHINES = (
    #     name            vCPU  GiB  GPU, count, GB each, NVMe GB
    _machine("a4-highgpu-8g", 224, 3968, "B200", 8, 180, 12000, fabric="roce", bandwidth=3200, on_demand=False, hyperdisk=True),
    _machine("a3-ultragpu-8g", 224, 2952, "H200", 8, 141, 12000, fabric="roce", bandwidth=3200, on_demand=False, hyperdisk=True),
    _machine("a3-megagpu-8g", 208, 1872, "H100", 8, 80, 6000, fabric="tcpxo", bandwidth=1600),
    _machine("a3-highgpu-8g", 208, 1872, "H100", 8, 80, 6000, fabric="tcpx", bandwidth=800),
    _machine("a3-highgpu-4g", 104, 936, "H100", 4, 80, 3000, on_demand=False),
    _machine("a3-highgpu-2g", 52, 468, "H100", 2, 80, 1500, on_demand=False),
    _machine("a3-highgpu-1g", 26, 234, "H100", 1, 80, 750, on_demand=False),
    _machine("a2-ultragpu-8g", 96, 1360, "A100", 8, 80, 3000),
    _machine("a2-ultragpu-4g", 48, 680, "A100", 4, 80, 1500),
    _machine("a2-ultragpu-2g", 24, 340, "A100", 2, 80, 750),
    _machine("a2-ultragpu-1g", 12, 170, "A100", 1, 80, 375),
    _machine("a2-megagpu-16g", 96, 1360, "A100", 16, 40),
    _machine("a2-highgpu-8g", 96, 680, "A100", 8, 40),
    _machine("a2-highgpu-4g", 48, 340, "A100", 4, 40),
    _machine("a2-highgpu-2g", 24, 170, "A100", 2, 40),
    _machine("a2-highgpu-1g", 12, 85, "A100", 1, 40),
    _machine("g2-standard-96", 96, 384, "L4", 8, 24),
    _machine("g2-standard-48", 48, 192, "L4", 4, 24),
    _machine("g2-standard-32", 32, 128, "L4", 1, 24),
    _machine("g2-standard-24", 24, 96, "L4", 2, 24),
    _machine("g2-standard-16", 16, 64, "L4", 1, 24),
    _machine("g2-standard-12", 12, 48, "L4", 1, 24),
    _machine("g2-standard-8", 8, 32, "L4", 1, 24),
    _machine("g2-standard-4", 4, 16, "L4", 1, 24),
    _machine("n2-standard-16", 16, 64),
    _machine("n2-standard-8", 8, 32),
    _machine("n2-standard-4", 4, 16),
)
# fmt: on

PLACE = Place(
    name="gcp",
    program="infra.gcp",
    errors=_errors,
    checkpoints=("instance", "network", "bucket", "filestore", "hyperdisk-ml"),
    settings=(*CLOUD_SETTINGS, "project", "budget.billing_account"),
    hints={
        "account_defaults": "GCP encrypts every disk by itself",
        "fleets.nics": "on GCP the interfaces follow from the machine type",
    },
    cloud=Cloud(
        machines=MACHINES,
        machine_example="a3-megagpu-8g",
        region=r"[a-z]+-[a-z]+\d+",
        region_example="us-central1",
        capacity=("on-demand", "spot", "reservation", "flex-start"),
        cache="filestore",
        preemption="compute-metadata",
        prices_page="https://cloud.google.com/compute/gpus-pricing",
        zonal_prices=True,
    ),
)
