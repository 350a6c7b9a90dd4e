"""GCP as a place: its machine types, and what it asks of a stack's settings, and how its networks are cut.

Sources of the figures:
https://docs.cloud.google.com/compute/docs/accelerator-optimized-machines (machine types, what each may be bought as)
https://docs.cloud.google.com/compute/docs/gpus/gpu-network-bandwidth (network interfaces and their bandwidth)
https://docs.cloud.google.com/cluster-toolkit/docs/machine-learning/a3-mega-enable-gpudirect-tcpxo (networks, MTU)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv4Network

from pydantic_core import PydanticCustomError

from stacks.places import dstack, fallback
from stacks.places.given import NAME, PROJECT, file_system, shared_vpc
from stacks.places.google_regions import wrong_region
from stacks.places.machine_types import NETWORKS, Fabric, Machine, Networks
from stacks.places.place import CLOUD_SETTINGS, SERVER_PORT, Cloud, Control, Place
from stacks.schema import Fleet, Stack
from stacks.settings.fields import gigabytes, known, setting_error

BILLING_ACCOUNT = re.compile(r"[0-9A-F]{6}-[0-9A-F]{6}-[0-9A-F]{6}")
IMAGE = re.compile(r"projects/[a-z0-9.:-]+/global/images/(family/)?[a-z][a-z0-9-]*")
POOL = re.compile(r"projects/\d+/locations/global/workloadIdentityPools/[a-z0-9-]{4,32}")
# https://docs.cloud.google.com/ai-hypercomputer/docs/create/create-vm: a block of machines that are close to one another
BLOCK = rf"/reservationBlocks/{NAME}(/reservationSubBlocks/{NAME})?"
RESERVATION = re.compile(rf"(projects/(?P<project>{PROJECT})/reservations/)?(?P<name>{NAME})(?P<block>{BLOCK})?")
SOFT_DELETE = range(7, 91)  # days: https://docs.cloud.google.com/storage/docs/soft-delete
ROOM = 37  # characters, of the 63 of a resource's name, beside what infra/gcp/names.py, Pulumi and the nodes' numbers add
NO_COMPACT_FLEX = ("tcpx", "tcpxo")  # https://docs.cloud.google.com/compute/docs/instances/placement-policies-overview
HYPERDISK_ML = ("a2-ultragpu", "a3-", "a4-", "g2-")  # https://docs.cloud.google.com/compute/docs/disks/hyperdisks
SMALLEST = 22  # prefix of a network that can be cut into the subnets of nodes and fabric
KEY = "GOOGLE_CREDENTIALS"  # the text of a service account's key, by which nodes elsewhere mount the bucket
BLOCKS = 16  # for the networks of a fabric
RESERVED = 4  # addresses of a subnet that GCP keeps
CHANNELS = 5  # of a budget: https://docs.cloud.google.com/billing/docs/how-to/budgets-notification-recipients


def _refused(stack: Stack) -> Iterator[PydanticCustomError]:
    """The most basic first."""
    for rule in (_network, shared_vpc, _fabrics, _room, _bucket, _filestore, file_system, _hyperdisk_ml, _people):
        yield from known(rule(stack))
    for index, fleet in enumerate(stack.fleets):
        yield from known(_fleet(stack, fleet, index))
        yield from known(_of_machine(stack, fleet, index))
    yield from known(fallback.of_backends(stack, CLOUD.machine))


def _network(stack: Stack) -> Iterator[PydanticCustomError]:
    network = stack.network
    if stack.project is None:
        yield setting_error("is missing; with flotilla:cloud gcp it is the id of your GCP project", "project")
    if network.nat == "per-zone":
        text = "per-zone is not on flotilla:cloud gcp, whose Cloud NAT serves all zones of a region (allowed here: one)"
        yield setting_error(text, "network", "nat")
    if not 8 <= network.cidr.prefixlen <= SMALLEST:
        text = f"{network.cidr} is a /{network.cidr.prefixlen}; take /8 to /22, which is cut into the subnets of nodes and fabric"
        yield setting_error(text, "network", "cidr")
    if len(network.subnets) > 1:
        yield setting_error(f"{len(network.subnets)} subnets, but nodes of a region share one; name only that", "network", "subnets")


def _fleet(stack: Stack, fleet: Fleet, index: int) -> Iterator[PydanticCustomError]:
    at = ("fleets", index)
    if len(stack.name) + len(fleet.name) > ROOM:
        text = f"{fleet.name!r} and the stack's name {stack.name!r} are too long for GCP: {ROOM} characters together, at most"
        yield setting_error(text, *at, "name")
    if fleet.image is not None and not IMAGE.fullmatch(fleet.image):
        yield setting_error(
            f"{fleet.image!r} is not a valid image, such as projects/<project>/global/images/<name>, or .../family/<name>", *at, "image"
        )
    if fleet.capacity.id is not None and not RESERVATION.fullmatch(fleet.capacity.id):
        text = f"{fleet.capacity.id!r} is not a valid reservation: a name, or projects/<project>/reservations/<name>"
        yield setting_error(f"{text}, and where it has blocks /reservationBlocks/<name> behind it", *at, "capacity", "id")
    elif fleet.provision == "dstack" and fleet.capacity.id and re.search(":|/reservationBlocks/", fleet.capacity.id):
        text = f"{fleet.capacity.id!r} is what dstack does not take, neither a block nor a reservation of a project with a domain"
        yield setting_error(f"{text}; take provision: pulumi", *at, "capacity", "id")
    if fleet.capacity.policy is not None and not re.fullmatch(NAME, fleet.capacity.policy):
        yield setting_error(
            f"{fleet.capacity.policy!r} is not the name of a policy: a-z first, then a-z, 0-9 and -", *at, "capacity", "policy"
        )
    if fleet.provision == "pulumi" and len(stack.network.zones) != 1:
        text = f"{list(stack.network.zones)}, but machines that Pulumi launches stand in one zone; name the one that has {fleet.machine}"
        yield setting_error(text, "network", "zones")


def reservation(stack: Stack, fleet: Fleet) -> tuple[str, str]:
    """Project and name of the fleet's reservation."""
    found = RESERVATION.fullmatch(fleet.capacity.id or "")
    assert found  # _fleet
    return found["project"] or stack.project or "", found["name"]


def fabric(stack: Stack) -> Fabric:
    """The one fabric that fleets of the stack are wired to."""
    for fleet in stack.fleets:
        if (wired := CLOUD.machine(fleet).wired(fleet.nodes)) != "none":
            return wired
    return "none"


def _fabrics(stack: Stack) -> Iterator[PydanticCustomError]:
    """Networks of one frame size serve one fabric, and a RoCE network lives in one zone."""
    chosen = fabric(stack)
    for index, fleet in enumerate(stack.fleets):
        other = CLOUD.machine(fleet).wired(fleet.nodes)
        if other not in ("none", chosen):
            text = f"{fleet.machine} has fabric {other}, an earlier fleet has {chosen}; each needs networks of its own, so make two stacks"
            yield setting_error(text, "fleets", index, "machine")
    if chosen == "roce" and len(stack.network.zones) != 1 and all(fleet.provision == "dstack" for fleet in stack.fleets):
        text = f"{list(stack.network.zones)}, but a RoCE network lives in one zone; name the one that has your machines"
        yield setting_error(text, "network", "zones")
    if chosen != "none" and stack.network.vpc:
        text = f"an existing network, but fabric {chosen} needs networks of its own, cut from one plan with the nodes'; leave vpc out"
        yield setting_error(text, "network", "vpc")


def _room(stack: Stack) -> Iterator[PydanticCustomError]:
    """Of a new network: the nodes' subnet holds all nodes, the fabric's those that are wired."""
    if stack.network.vpc or stack.network.cidr.prefixlen > SMALLEST:
        return
    ranges = cut(stack.network.cidr, NETWORKS[fabric(stack)])
    wired = [fleet for fleet in stack.fleets if CLOUD.machine(fleet).wired(fleet.nodes) != "none"]
    held = [("the subnet of the nodes", ranges.main, stack.fleets)]
    held += [("each network of the fabric", subnet, wired) for subnet in ranges.fabric[:1]]
    for where, subnet, fleets in held:
        control = stack.control_node and subnet == ranges.main
        nodes = sum(fleet.nodes for fleet in fleets)
        if (most := usable(subnet)) < nodes + control:
            beside = ", and there is the control node" if control else ""
            text = f"{stack.network.cidr} leaves {most} addresses in {where}, but the fleets have {nodes} nodes{beside}; widen it"
            yield setting_error(text, "network", "cidr")


def _of_machine(stack: Stack, fleet: Fleet, index: int) -> Iterator[PydanticCustomError]:
    """What a machine type does not bear."""
    at, kind = ("fleets", index), CLOUD.machine(fleet)
    if fleet.capacity.kind == "flex-start" and not kind.gpus:
        text = f"flex-start is a queue for GPUs, and {kind.name} has none (allowed: on-demand, spot, reservation)"
        yield setting_error(text, *at, "capacity", "kind")
    if fleet.placement == "cluster" and fleet.capacity.kind == "reservation":
        yield setting_error("cluster is set by the reservation itself; leave it out", *at, "placement")
    if fleet.provision == "dstack" and fleet.capacity.policy:
        yield setting_error("belongs to provision: pulumi; dstack reads it from the reservation", *at, "capacity", "policy")
    if fleet.placement == "cluster" and fleet.capacity.kind == "flex-start" and kind.fabric in NO_COMPACT_FLEX:
        yield setting_error(f"cluster is not possible for {kind.name} with flex-start; leave it out", *at, "placement")
    if fleet.provision == "dstack" and kind.name == "a3-ultragpu-8g" and fleet.nodes > 1:
        text = f"dstack gives {kind.name} no RDMA interfaces, so its nodes would talk over TCP; take pulumi"
        yield setting_error(text, *at, "provision")
    if fleet.provision == "pulumi" and kind.fabric == "tcpx" and fleet.image is None:
        text = "is missing; no public image has GPUDirect-TCPX and a disk that dstack can write; name yours, or take provision: dstack"
        yield setting_error(text, *at, "image")


def _bucket(stack: Stack) -> Iterator[PydanticCustomError]:
    checkpoints = stack.checkpoints
    if checkpoints.kind == "bucket" and checkpoints.keep_days not in SOFT_DELETE:
        yield setting_error(f"{checkpoints.keep_days} days, but GCS keeps what was deleted for 7 to 90", "checkpoints", "keep_days")


def _filestore(stack: Stack) -> Iterator[PydanticCustomError]:
    checkpoints = stack.checkpoints
    if checkpoints.kind == "filestore" and checkpoints.file_system is None:
        size = gigabytes(checkpoints.size or "0GB")
        step = 256 if size < 10240 else 2560  # https://docs.cloud.google.com/filestore/docs/service-tiers
        if not 1024 <= size <= 102400 or size % step:
            text = f"{checkpoints.size!r} is refused by Filestore; it takes 1TB to 9.75TB by steps of 256GB, 10TB to 100TB by 2.5TB"
            yield setting_error(text, "checkpoints", "size")


def _hyperdisk_ml(stack: Stack) -> Iterator[PydanticCustomError]:
    if stack.checkpoints.kind != "hyperdisk-ml":
        return
    for index, fleet in enumerate(stack.fleets):
        if fleet.provision == "dstack":
            text = "dstack, but checkpoints.kind hyperdisk-ml is a disk that Pulumi attaches; take pulumi"
            yield setting_error(text, "fleets", index, "provision")
        if fleet.machine and not fleet.machine.startswith(HYPERDISK_ML):
            text = f"{fleet.machine} takes no Hyperdisk ML, which checkpoints.kind asks for"
            yield setting_error(text, "fleets", index, "machine")
    if (nodes := sum(fleet.nodes for fleet in stack.fleets)) > 1:
        text = f"hyperdisk-ml is written by one node alone, but the fleets have {nodes} (allowed: bucket, filestore)"
        yield setting_error(text, "checkpoints", "kind")
    if not 4 <= gigabytes(stack.checkpoints.size or "0GB") <= 64 * 1024:
        text = f"{stack.checkpoints.size!r} is refused by Hyperdisk ML; it takes 4GB to 64TB"
        yield setting_error(text, "checkpoints", "size")


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


@dataclass(frozen=True)
class Blocks:
    """`main` of the nodes' subnet, one of `vpcs` for each extra network, one of `rdma` for each subnet of the RoCE network."""

    main: IPv4Network
    vpcs: tuple[IPv4Network, ...] = ()
    rdma: tuple[IPv4Network, ...] = ()

    @property
    def fabric(self) -> tuple[IPv4Network, ...]:
        return (*self.vpcs, *self.rdma)


def cut(cidr: IPv4Network, networks: Networks) -> Blocks:
    """Ranges of all subnets within `cidr`: half for the nodes, a sixteenth of the rest for each network of the fabric.

    All interfaces of a machine must be in ranges that do not overlap, so the fabric's networks share one plan with the main one.
    Raises ValueError where a network is too small to be cut.
    """
    if cidr.prefixlen > SMALLEST:
        raise ValueError(f"{cidr} is too small to be cut into subnets; take a /22 or larger")
    main, rest = cidr.subnets(prefixlen_diff=1)
    blocks = list(rest.subnets(new_prefix=rest.prefixlen + 4))
    assert networks.vpcs + networks.rdma_subnets <= BLOCKS == len(blocks)
    return Blocks(main, tuple(blocks[: networks.vpcs]), tuple(blocks[networks.vpcs : networks.vpcs + networks.rdma_subnets]))


def usable(subnet: IPv4Network) -> int:
    """How many addresses of a subnet nodes can have."""
    return subnet.num_addresses - RESERVED


def control_zone(stack: Stack) -> str:
    """Of the control node and its disk: the stack's first, else one that nearly every region has."""
    return stack.network.zones[0] if stack.network.zones else f"{stack.region}-b"


def through_control(stack: Stack) -> str:
    """SSH to the control node by Identity-Aware Proxy and OS Login, with the keys that gcloud makes for a person."""
    machine = f"flotilla-{stack.name}-control --project {stack.project} --zone {control_zone(stack)}"
    return f"gcloud compute ssh {machine} --tunnel-through-iap --quiet --"


def _forward(stack: Stack) -> str:
    """The proxy ends what is idle for an hour; SSH's questions keep it."""
    assert stack.dstack  # stacks/rules.py
    return f"{through_control(stack)} -N -o ServerAliveInterval=30 -L {stack.dstack.port}:127.0.0.1:{SERVER_PORT}"


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
    _machine("g4-standard-384", 384, 1440, "RTXPRO6000", 8, 96, hyperdisk=True),
    _machine("g4-standard-192", 192, 720, "RTXPRO6000", 4, 96, hyperdisk=True),
    _machine("g4-standard-96", 96, 360, "RTXPRO6000", 2, 96, hyperdisk=True),
    _machine("g4-standard-48", 48, 180, "RTXPRO6000", 1, 96, hyperdisk=True),
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

CLOUD = Cloud(
    machines=MACHINES,
    machine_example="a3-megagpu-8g",
    region=r"[a-z]+-[a-z]+\d+",
    region_example="us-central1",
    capacity=("on-demand", "spot", "reservation", "flex-start"),
    cache="filestore",
    preemption="compute-metadata",
    prices_page="https://cloud.google.com/compute/gpus-pricing",
    zonal_prices=True,
    arm=("a4x-", "c4a-", "n4a-", "t2a-"),
    tags=57,  # of 64, less three of ours and four that dstack puts on a machine
    wrong_region=wrong_region,
    control=Control("e2-medium", 2, _forward),
)
PLACE = Place(
    name="gcp",
    program="infra.gcp",
    refused=_refused,
    checkpoints=("instance", "network", "bucket", "filestore", "hyperdisk-ml"),
    settings=(*CLOUD_SETTINGS, *fallback.SETTINGS, "project", "network.host_rules", "budget.billing_account", "fleets.capacity.policy"),
    hints={
        "account_defaults": "GCP encrypts every disk by itself",
        "fleets.nics": "on GCP the interfaces follow from the machine type",
    },
    cloud=CLOUD,
    warnings=dstack.warnings,
    variables=fallback.variables(KEY),
)
