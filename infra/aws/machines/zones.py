"""The zones in which a stack's machines stand."""

from __future__ import annotations

from stacks.load import StackError
from stacks.schema import Stack


def chosen(stack: Stack, offered: dict[str, list[str]]) -> list[str]:
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
    if errors:
        raise StackError("\n".join(f"stacks/Pulumi.{stack.name}.yaml: flotilla:{error}" for error in errors))
    return list(stack.network.zones) or sorted(common)
