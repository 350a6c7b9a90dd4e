"""The machine types of a stack's fleets, checked against what the stack asks of them before anything is created."""

from __future__ import annotations

from collections.abc import Iterator

from stacks.load import StackError
from stacks.machines import Cloud, Fabric, Machine, machine
from stacks.schema import Fleet, Gpu, Stack


def machines(stack: Stack, cloud: Cloud) -> dict[str, Machine]:
    """The machine type of each fleet, by the fleet's name. Raises StackError with a line for each setting that does not fit."""
    found, wrong = {}, []
    for index, fleet in enumerate(stack.fleets):
        at = f"stacks/Pulumi.{stack.name}.yaml: flotilla:fleets[{index}]"
        try:
            found[fleet.name] = machine(cloud, fleet.machine or "")
        except ValueError as error:
            wrong.append(f"{at}.machine: {error}")
            continue
        wrong += [f"{at}.{fault}" for fault in _misfits(fleet, found[fleet.name])]
    if wrong:
        raise StackError("\n".join(wrong))
    return found


def gpus(found: dict[str, Machine]) -> dict[str, Gpu]:
    """What dstack is asked for, by name of the fleet; fleets without GPUs are left out."""
    return {fleet: Gpu(name=one.gpu, count=one.gpus, memory=f"{one.gpu_memory}GB") for fleet, one in found.items() if one.gpu}


def fabric(fleet: Fleet, kind: Machine) -> Fabric:
    """What a fleet's machines are wired to; one node needs none."""
    return kind.fabric if fleet.nodes > 1 else "none"


def _misfits(fleet: Fleet, one: Machine) -> Iterator[str]:
    """Settings beyond the machine type, each as `key: what is wrong`."""
    if fleet.cpus is not None and fleet.cpus > one.cpus:
        yield f"cpus: {fleet.cpus} is more than the {one.cpus} of {one.name}"
    if fleet.nics is not None and one.cloud == "aws" and fleet.nics > len(one.nics()):
        yield f"nics: {fleet.nics} is more than the {len(one.nics())} of {one.name}"
    if fleet.capacity.kind == "on-demand" and not one.on_demand:
        yield f"capacity.kind: on-demand is not how {one.cloud} sells {one.name}; take another kind"
