"""Which settings go together: what a cloud has and what it lacks, told before anything is created."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic_core import PydanticCustomError

from stacks.field_types import TAG_KEY, problem
from stacks.rules import aws, gcp, slurm

if TYPE_CHECKING:
    from stacks.schema import Fleet, Stack

CLOUDS = ("aws", "gcp")
# Settings of clouds alone, with what they are to be on others.
CLOUD_ONLY = ("region", "tags", "monitoring", "network", "access", "budget", "ci", "protect", "environment", "account_defaults")
CLOUD_FLEET_ONLY = ("machine", "provision", "capacity", "placement", "nics", "image", "idle_duration")
REGIONS = {"aws": (r"[a-z]+(-[a-z]+)+-\d", "us-east-1"), "gcp": (r"[a-z]+-[a-z]+\d+", "us-central1")}
KINDS = {
    "local": ("instance", "network", "shared"),
    "ssh": ("instance", "network", "shared"),
    "slurm": ("shared",),
    "aws": ("instance", "network", "bucket", "lustre"),
    "gcp": ("instance", "network", "bucket", "filestore", "hyperdisk-ml"),
}
CAPACITY = {"aws": ("on-demand", "spot", "reservation", "block"), "gcp": ("on-demand", "spot", "reservation", "flex-start")}
NAME = 24  # characters of a stack's name on a cloud: its resources are named after it, buckets and roles with up to 64 in all
OWN_TAGS = ("environment", "project", "stack")


def faults(stack: Stack) -> Iterator[PydanticCustomError]:
    """What is wrong with settings that are each in order; the first is the one to tell."""
    yield from _names(stack)
    yield from _cluster(stack)
    yield from _ssh(stack)
    yield from _driven(stack)
    if stack.cloud in CLOUDS:
        yield from _cloud(stack)
        for index, fleet in enumerate(stack.fleets):
            yield from _cloud_fleet(stack, fleet, index)
        yield from {"aws": aws, "gcp": gcp}[stack.cloud].faults(stack)
    else:
        yield from _no_cloud(stack)
    yield from _slurm(stack)
    yield from _cache(stack)


def _cache(stack: Stack) -> Iterator[PydanticCustomError]:
    """On clouds /checkpoints is the only folder that nodes may share, and a bucket has neither the locks nor the renames of a cache."""
    path, kind = stack.cache.path, stack.checkpoints.kind
    if path is None or stack.cloud not in CLOUDS:
        return
    if not path.is_relative_to("/checkpoints"):
        yield problem(f"{str(path)!r} is not below /checkpoints, which is what nodes of {stack.cloud} share", "cache", "path")
    if kind in ("bucket", "hyperdisk-ml"):
        shared = {"aws": "lustre", "gcp": "filestore"}[stack.cloud]
        text = f"a cache needs locks and renames, which checkpoints.kind {kind} has not; take kind {shared}, or leave path out"
        yield problem(text, "cache", "path")


def _slurm(stack: Stack) -> Iterator[PydanticCustomError]:
    image = stack.task.image or ""
    if stack.cloud == "slurm":
        yield from slurm.faults(stack)
    elif stack.says("slurm"):
        yield problem(f"belongs to flotilla:cloud slurm, but that is {stack.cloud}", "slurm")
    elif image.startswith("/"):
        yield problem(f"{image!r} is a file; those run under flotilla:cloud slurm alone, so name an image and its tag", "task", "image")


def warnings(stack: Stack) -> list[str]:
    """What works, but not as most people expect. Of a local stack nothing: its nodes share this machine's folders."""
    first, checkpoints = stack.fleets[0], stack.checkpoints
    if stack.cloud == "local" or checkpoints.kind != "instance":
        return []
    lost = []
    if first.nodes > 1:
        lost += [
            f"the {first.nodes} nodes of fleet {first.name!r} do not share checkpoints",
            "a run that lands on others does not find its own",
        ]
    if stack.cloud in CLOUDS:
        lost += ["they are gone with the machine"]
    shared = ", ".join(kind for kind in KINDS[stack.cloud] if kind not in ("instance", "network"))
    return [f"flotilla:checkpoints.kind: instance is a folder of each node: {'; '.join(lost)}; take {shared}"] if lost else []


def _names(stack: Stack) -> Iterator[PydanticCustomError]:
    for index, fleet in enumerate(stack.fleets):
        if fleet.name in [other.name for other in stack.fleets[:index]]:
            yield problem(f"{fleet.name!r} is taken by an earlier fleet", "fleets", index, "name")


def _cluster(stack: Stack) -> Iterator[PydanticCustomError]:
    """Of a cluster over several fleets, and of a job: what dstack can place."""
    known = [fleet.name for fleet in stack.fleets]
    for index, name in enumerate(stack.task.fleets):
        at = ("task", "fleets", index)
        if name not in known:
            yield problem(f"{name!r} is no fleet of this stack (allowed: {', '.join(known)})", *at)
        elif name in stack.task.fleets[:index]:
            yield problem(f"{name!r} is listed twice", *at)
        elif len(stack.task.fleets) > 1 and stack.cloud not in ("ssh", "local") and stack.fleets[known.index(name)].provision != "pulumi":
            text = "makes a cluster of several fleets, for which the machines must be there: flotilla:cloud ssh, or provision: pulumi"
            yield problem(f"{name!r} {text}", *at)
    jumps = [fleet.ssh.proxy_jump for fleet in stack.fleets if fleet.ssh and fleet.name in stack.task.fleets]
    if any(jump != jumps[0] for jump in jumps):
        yield problem("name fleets with different ssh.proxy_jump; to dstack they are one fleet, which has one", "task", "fleets")
    if stack.task.job and stack.cloud in ("local", "slurm"):
        yield problem(f"is for dstack, but flotilla:cloud is {stack.cloud}", "task", "job")


def _ssh(stack: Stack) -> Iterator[PydanticCustomError]:
    for index, fleet in enumerate(stack.fleets):
        if stack.cloud == "ssh" and fleet.ssh is None:
            yield problem("is missing; with flotilla:cloud ssh a fleet lists its hosts there", "fleets", index, "ssh")
        if stack.cloud != "ssh" and fleet.ssh is not None:
            yield problem(f"belongs to flotilla:cloud ssh, but that is {stack.cloud}", "fleets", index, "ssh")


def _driven(stack: Stack) -> Iterator[PydanticCustomError]:
    if stack.dstack and stack.dstack.drive and stack.cloud not in (*CLOUDS, "ssh"):
        yield problem(f"no node of flotilla:cloud {stack.cloud} is dstack's; leave it out", "dstack", "drive")


def _no_cloud(stack: Stack) -> Iterator[PydanticCustomError]:
    for key in (*CLOUD_ONLY, "project"):
        if stack.says(key):
            yield problem(f"belongs to flotilla:cloud aws or gcp, but that is {stack.cloud}", key)
    for index, fleet in enumerate(stack.fleets):
        if stack.cloud == "local" and fleet.fabric is not None:
            yield problem("joins machines, but with flotilla:cloud local all nodes are this one", "fleets", index, "fabric")
        for key in CLOUD_FLEET_ONLY:
            if fleet.says(key):
                yield problem(f"belongs to flotilla:cloud aws or gcp, but that is {stack.cloud}", "fleets", index, key)
    yield from _kind(stack)


def _kind(stack: Stack) -> Iterator[PydanticCustomError]:
    kind, kinds = stack.checkpoints.kind, KINDS[stack.cloud]
    if kind not in kinds:
        yield problem(f"{kind} is not on flotilla:cloud {stack.cloud} (allowed here: {', '.join(kinds)})", "checkpoints", "kind")


def _cloud(stack: Stack) -> Iterator[PydanticCustomError]:
    if len(stack.name) > NAME:
        yield problem(f"has {len(stack.name)} characters; a cloud's resources are named after it, so take {NAME} at most", "name")
    for key in stack.tags:
        if not TAG_KEY.fullmatch(key):
            yield problem(f"{key!r} is not a tag of a-z, 0-9, _ and -, a-z first", "tags", key)
        if key in OWN_TAGS:
            yield problem(f"is set for you; take another than {', '.join(OWN_TAGS)}", "tags", key)
    pattern, example = REGIONS[stack.cloud]
    if stack.region is None:
        yield problem(f"is missing; it is a region such as {example}", "region")
    elif not re.fullmatch(pattern, stack.region):
        yield problem(f"{stack.region!r} is no region of {stack.cloud}; one is {example}", "region")
    for index, zone in enumerate(stack.network.zones):
        if not zone.startswith(stack.region or ""):
            yield problem(f"{zone!r} is not in region {stack.region}", "network", "zones", index)
    yield from _kind(stack)
    first = stack.fleets[0]
    if stack.checkpoints.kind == "network" and (first.nodes > 1 or first.provision == "pulumi"):
        shared = ", ".join(kind for kind in KINDS[stack.cloud] if kind not in ("instance", "network"))
        text = (
            f"network is a volume that dstack attaches to one node, but fleet {first.name!r} has {first.nodes}, provision {first.provision}"
        )
        yield problem(f"{text}; take {shared}", "checkpoints", "kind")
    mounted_inside = stack.checkpoints.kind not in ("instance", "network", "shared") and first.provision == "dstack"
    if mounted_inside and stack.task.user not in (None, "root", "0", "root:root", "0:0"):
        text = f"{stack.task.user!r}, but checkpoints.kind {stack.checkpoints.kind} is mounted inside of the container, which takes root"
        yield problem(f"{text}; leave it out, or take provision: pulumi", "task", "user")
    if stack.access is None and any(fleet.provision == "pulumi" for fleet in stack.fleets):
        yield problem("is missing; with provision: pulumi it says how nodes are reached (identity_file, public_key, via)", "access")
    if stack.access is not None and all(fleet.provision == "dstack" for fleet in stack.fleets):
        yield problem("belongs to provision: pulumi, but dstack launches the machines of every fleet", "access")


def _cloud_fleet(stack: Stack, fleet: Fleet, index: int) -> Iterator[PydanticCustomError]:
    at = ("fleets", index)
    if fleet.machine is None:
        example = {"aws": "p5.48xlarge", "gcp": "a3-megagpu-8g"}[stack.cloud]
        yield problem(f"is missing; with flotilla:cloud {stack.cloud} a fleet names its machine type, such as {example}", *at, "machine")
    for key in ("gpu", "memory", "arch", "fabric"):
        if fleet.says(key):
            yield problem(f"follows from machine {fleet.machine}; leave it out", *at, key)
    kinds = CAPACITY[stack.cloud]
    if fleet.capacity.kind not in kinds:
        text = f"{fleet.capacity.kind} is not on flotilla:cloud {stack.cloud} (allowed here: {', '.join(kinds)})"
        yield problem(text, *at, "capacity", "kind")
    if fleet.provision == "dstack":
        for key in ("nics", "image"):
            if fleet.says(key):
                yield problem("belongs to provision: pulumi; where dstack launches the machines it chooses this itself", *at, key)
    elif fleet.idle_duration is not None:
        yield problem("belongs to provision: dstack; machines that Pulumi launches stay until `pulumi destroy`", *at, "idle_duration")
    if fleet.provision == "dstack" and fleet.capacity.kind == "flex-start":
        yield problem("flex-start needs provision: pulumi; dstack does not queue for it", *at, "capacity", "kind")
