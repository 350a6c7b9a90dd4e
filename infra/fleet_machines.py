"""The machine types of a stack's fleets, checked against what the stack asks of them before anything is created."""

from __future__ import annotations

from collections.abc import Iterator

from stacks.load import StackError
from stacks.machines import Fabric, Machine
from stacks.places import machine
from stacks.schema import Fleet, Gpu, Stack


def machines(stack: Stack, cloud: str) -> dict[str, Machine]:
    """The machine type of each fleet, by the fleet's name. Raises StackError with a line for each setting that does not fit."""
    found, errors = {}, []
    for index, fleet in enumerate(stack.fleets):
        at = f"stacks/Pulumi.{stack.name}.yaml: flotilla:fleets[{index}]"
        try:
            found[fleet.name] = machine(cloud, fleet.machine or "")
        except ValueError as error:
            errors.append(f"{at}.machine: {error}")
            continue
        errors += [f"{at}.{error}" for error in _errors(fleet, found[fleet.name])]
    if errors:
        raise StackError("\n".join(errors))
    return found


def gpus(found: dict[str, Machine]) -> dict[str, Gpu]:
    """What dstack is asked for, by name of the fleet; fleets without GPUs are left out."""
    return {fleet: Gpu(name=kind.gpu, count=kind.gpus, memory=f"{kind.gpu_memory}GB") for fleet, kind in found.items() if kind.gpu}


def fabric(fleet: Fleet, kind: Machine) -> Fabric:
    """What a fleet's machines are wired to; one node needs none."""
    return kind.fabric if fleet.nodes > 1 else "none"


def _errors(fleet: Fleet, kind: Machine) -> Iterator[str]:
    """Settings beyond the machine type, each as `key: error`."""
    if fleet.cpus is not None and fleet.cpus > kind.cpus:
        yield f"cpus: {fleet.cpus} is more than the {kind.cpus} of {kind.name}"
    if fleet.nics is not None and fleet.nics > len(kind.nics()):
        yield f"nics: {fleet.nics} is more than the {len(kind.nics())} of {kind.name}"
    if fleet.capacity.kind == "on-demand" and not kind.on_demand:
        yield f"capacity.kind: on-demand is not how {kind.cloud} sells {kind.name}; take another kind"
