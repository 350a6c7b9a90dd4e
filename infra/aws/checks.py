"""What AWS would refuse of a stack, raised before anything is created."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from infra import fleet_machines
from infra.aws.addresses import cut, usable
from stacks.load import StackError
from stacks.machines import Machine
from stacks.schema import Stack


def machines(stack: Stack) -> dict[str, Machine]:
    """The machine type of each fleet, by its name. Raises StackError with a line for each setting that does not fit."""
    found = fleet_machines.machines(stack, "aws")
    _refuse(stack, [*_addresses(stack), *_blocks(stack, found)])
    return found


def zones(stack: Stack, offered: dict[str, list[str]]) -> list[str]:
    """The zones to use, in order: those that offer every machine type of `offered`, or those of them that the stack names.

    Local zones, which a region may have too, are left out: no NAT gateway stands there. Raises StackError where none is left.
    """
    offered = {machine: [zone for zone in where if zone[:-1] == stack.region] for machine, where in offered.items()}
    errors, common = [], set.intersection(*(set(zones) for zones in offered.values()))
    for machine, where in offered.items():
        if not where:
            index = next(index for index, fleet in enumerate(stack.fleets) if fleet.machine == machine)
            errors.append(f"fleets[{index}].machine: {machine!r} is not offered in {stack.region}; take another region or machine type")
    if not errors and not common:
        each = "; ".join(f"{machine} in {', '.join(sorted(where))}" for machine, where in offered.items())
        errors.append(f"fleets: no zone of {stack.region} offers all machine types ({each})")
    for index, zone in enumerate(stack.network.zones):
        if common and zone not in common:
            errors.append(
                f"network.zones[{index}]: {zone!r} does not offer {', '.join(offered)} (zones that do: {', '.join(sorted(common))})"
            )
    _refuse(stack, errors)
    return list(stack.network.zones) or sorted(common)


def _addresses(stack: Stack) -> Iterator[str]:
    if stack.network.vpc:
        return
    try:
        cut(stack.network.cidr, list(stack.network.zones))
    except ValueError as error:
        yield f"network.zones: {error}"
        return
    [zone] = cut(stack.network.cidr, [f"{stack.region}a"]).values()  # they are all of one size
    room, nodes = usable(zone.private), sum(fleet.nodes for fleet in stack.fleets)
    if nodes > room:
        yield f"network.cidr: {stack.network.cidr} leaves {room} addresses in a zone, but the fleets have {nodes} nodes; take a larger one"


def _blocks(stack: Stack, machines: dict[str, Machine]) -> Iterator[str]:
    for index, fleet in enumerate(stack.fleets):
        if fleet.capacity.kind == "block" and not machines[fleet.name].name.startswith(("p", "trn")):
            yield f"fleets[{index}].capacity.kind: AWS sells no capacity blocks of {fleet.machine}; it does of P machines"


def _refuse(stack: Stack, errors: Iterable[str]) -> None:
    if lines := [f"stacks/Pulumi.{stack.name}.yaml: flotilla:{error}" for error in errors]:
        raise StackError("\n".join(lines))
