"""What GCP would refuse of a stack, raised before anything is created."""

from __future__ import annotations

from collections.abc import Iterator

from infra import fleet_machines
from infra.gcp import addresses
from stacks.field_types import gigabytes
from stacks.load import StackError
from stacks.machines import NETWORKS, Fabric, Machine
from stacks.schema import Fleet, Stack

ROOM = 37  # characters, of the 63 of a resource's name, beside what names.py, Pulumi and the nodes' numbers add
NO_COMPACT_FLEX = ("tcpx", "tcpxo")  # https://docs.cloud.google.com/compute/docs/instances/placement-policies-overview
HYPERDISK_ML = ("a2-ultragpu", "a3-", "a4-", "g2-")  # https://docs.cloud.google.com/compute/docs/disks/hyperdisks


def machines(stack: Stack) -> dict[str, Machine]:
    """The machine type of each fleet, by its name. Raises StackError with a line for each setting that does not fit."""
    found = fleet_machines.machines(stack, "gcp")
    if errors := [f"stacks/Pulumi.{stack.name}.yaml: flotilla:{at}: {text}" for at, text in _errors(stack, found)]:
        raise StackError("\n".join(errors))
    return found


def fabric(stack: Stack, found: dict[str, Machine]) -> Fabric:
    """The one fabric that fleets of the stack are wired to."""
    for fleet in stack.fleets:
        if (wired := fleet_machines.fabric(fleet, found[fleet.name])) != "none":
            return wired
    return "none"


def _errors(stack: Stack, found: dict[str, Machine]) -> Iterator[tuple[str, str]]:
    yield from _fabrics(stack, found)
    yield from _room(stack, found)
    for index, fleet in enumerate(stack.fleets):
        kind, at = found[fleet.name], f"fleets[{index}]"
        if len(stack.name) + len(fleet.name) > ROOM:
            yield (
                f"{at}.name",
                f"{fleet.name!r} and the stack's name {stack.name!r} are too long for GCP: {ROOM} characters together, at most",
            )
        yield from _capacity(fleet, kind, at)
        yield from _placement(fleet, kind, at)
        yield from _provision(stack, fleet, kind, at)
    yield from _disk(stack)


def _fabrics(stack: Stack, found: dict[str, Machine]) -> Iterator[tuple[str, str]]:
    """Networks of one frame size serve one fabric, and a RoCE network lives in one zone."""
    chosen = fabric(stack, found)
    for index, fleet in enumerate(stack.fleets):
        other = fleet_machines.fabric(fleet, found[fleet.name])
        if other not in ("none", chosen):
            text = f"{fleet.machine} has fabric {other}, an earlier fleet has {chosen}; each needs networks of its own, so make two stacks"
            yield f"fleets[{index}].machine", text
    if chosen == "roce" and len(stack.network.zones) != 1:
        yield "network.zones", f"{list(stack.network.zones)}, but a RoCE network lives in one zone; name the one that has your machines"
    if chosen != "none" and stack.network.vpc:
        yield "network.vpc", f"an existing network, but fabric {chosen} needs networks of its own, cut from one plan; leave vpc out"


def _room(stack: Stack, found: dict[str, Machine]) -> Iterator[tuple[str, str]]:
    """Of a new network: the nodes' subnet holds all nodes, the fabric's those that are wired."""
    if stack.network.vpc:
        return
    ranges = addresses.cut(stack.network.cidr, NETWORKS[fabric(stack, found)])
    wired = [fleet for fleet in stack.fleets if fleet_machines.fabric(fleet, found[fleet.name]) != "none"]
    held = [("the subnet of the nodes", ranges.main, stack.fleets)]
    held += [("each network of the fabric", subnet, wired) for subnet in ranges.fabric[:1]]
    for where, subnet, fleets in held:
        nodes = sum(fleet.nodes for fleet in fleets)
        if (most := addresses.usable(subnet)) < nodes:
            yield "network.cidr", f"{stack.network.cidr} leaves {most} addresses in {where}, but the fleets have {nodes} nodes; widen it"


def _capacity(fleet: Fleet, kind: Machine, at: str) -> Iterator[tuple[str, str]]:
    if fleet.capacity.kind == "flex-start" and not kind.gpus:
        yield f"{at}.capacity.kind", f"flex-start is a queue for GPUs, and {kind.name} has none (allowed: on-demand, spot, reservation)"


def _placement(fleet: Fleet, kind: Machine, at: str) -> Iterator[tuple[str, str]]:
    if fleet.placement != "cluster":
        return
    if fleet.capacity.kind == "reservation":
        yield f"{at}.placement", "cluster is set by the reservation itself; leave it out"
    if fleet.capacity.kind == "flex-start" and kind.fabric in NO_COMPACT_FLEX:
        yield f"{at}.placement", f"cluster is not possible for {kind.name} with flex-start; leave it out"


def _provision(stack: Stack, fleet: Fleet, kind: Machine, at: str) -> Iterator[tuple[str, str]]:
    if fleet.provision == "dstack" and kind.name == "a3-ultragpu-8g" and fleet.nodes > 1:
        yield f"{at}.provision", f"dstack gives {kind.name} no RDMA interfaces, so its nodes would talk over TCP; take pulumi"
    if fleet.provision == "pulumi" and kind.fabric == "tcpx" and fleet.image is None:
        text = "is missing; no public image has GPUDirect-TCPX and a disk that dstack can write; name yours, or take provision: dstack"
        yield f"{at}.image", text


def _disk(stack: Stack) -> Iterator[tuple[str, str]]:
    if stack.checkpoints.kind != "hyperdisk-ml":
        return
    for index, fleet in enumerate(stack.fleets):
        if not fleet.machine or not fleet.machine.startswith(HYPERDISK_ML):
            yield f"fleets[{index}].machine", f"{fleet.machine} takes no Hyperdisk ML, which checkpoints.kind asks for"
    size = gigabytes(stack.checkpoints.size or "0GB")
    if not 4 <= size <= 64 * 1024:
        yield "checkpoints.size", f"{stack.checkpoints.size!r} is refused by Hyperdisk ML; it takes 4GB to 64TB"
