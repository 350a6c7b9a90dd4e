"""The places that there are, and their machine types."""

from __future__ import annotations

from difflib import get_close_matches

from stacks.places import aws, dstack, gcp, local, slurm, ssh
from stacks.places.machine_types import Machine
from stacks.places.place import Cloud, Control, Place
from stacks.schema import Fleet, Gpu, Stack

PLACES: dict[str, Place] = {place.name: place for place in (local.PLACE, ssh.PLACE, slurm.PLACE, aws.PLACE, gcp.PLACE, dstack.PLACE)}


def place_of(stack: Stack) -> Place:
    return PLACES[stack.cloud]


def cloud_of(stack: Stack) -> Cloud | None:
    """What the stack's place adds as a cloud; None where it is none."""
    return PLACES[stack.cloud].cloud


def control_of(stack: Stack) -> Control | None:
    """The control node that the stack asks for."""
    cloud = cloud_of(stack)
    return cloud.control if cloud and stack.control_node else None


def clouds() -> list[str]:
    """Names of the places that rent out machines."""
    return [name for name, place in PLACES.items() if place.cloud]


def machines(stack: Stack) -> dict[str, Machine]:
    """The machine type of each fleet, by the fleet's name."""
    return {fleet.name: machine(stack.cloud, fleet.machine or "") for fleet in stack.fleets}


def gpu_of(kind: Machine) -> Gpu | None:
    """What dstack is asked for; None of a machine type without GPUs."""
    return Gpu(name=kind.gpu, count=kind.gpus, memory=f"{kind.gpu_memory}GB") if kind.gpu else None


def like(kind: Machine, fleet: Fleet) -> Fleet:
    """The least that a machine of another cloud has in place of the fleet's own type: the same GPUs, half its CPUs and memory."""
    memory = fleet.memory or f"{kind.memory // 2}GB.."
    return fleet.model_copy(update={"machine": None, "gpu": gpu_of(kind), "cpus": fleet.cpus or kind.cpus // 2, "memory": memory})


def gpus(machines: dict[str, Machine]) -> dict[str, Gpu]:
    """What dstack is asked for, by name of the fleet; fleets without GPUs are left out."""
    return {fleet: gpu for fleet, kind in machines.items() if (gpu := gpu_of(kind))}


def machine(cloud: str, name: str) -> Machine:
    """The machine type of that name. Raises ValueError, which names the nearest."""
    tables = {place.name: {known.name: known for known in place.cloud.machines} for place in PLACES.values() if place.cloud}
    arm = {place.name: place.cloud.arm for place in PLACES.values() if place.cloud}
    names = list(tables[cloud])
    if name in tables[cloud]:
        return tables[cloud][name]
    other = next((other for other, table in tables.items() if name in table), None)
    if other is not None:
        raise ValueError(f"{name!r} is a machine type of {other}, not of {cloud} (known: {', '.join(names)})")
    if name.startswith(arm[cloud]):
        raise ValueError(f"{name!r} has Arm processors, but the images that nodes of {cloud} boot are for x86")
    near = get_close_matches(name, names, n=1)
    guess = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(f"{name!r} is not a machine type of {cloud} in stacks/places/{cloud}.py{guess} (known: {', '.join(names)})")
