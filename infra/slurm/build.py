"""A Slurm cluster as the site: Pulumi creates nothing on it; the scheduler lends its nodes to jobs.

Where `sinfo` is on PATH, which is on the cluster's login nodes, the allocation is compared with what the cluster has.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import pulumi

from stacks.load import StackError
from stacks.schema import Stack
from stacks.site import Site
from stacks.slurm import seconds

SINFO_SECONDS = 30  # slurmctld may be busy
FORMAT = "%P|%a|%l|%D|%c|%G"  # sinfo(1): partition, availability, time limit, nodes, CPUs and generic resources of each


@dataclass(frozen=True)
class Group:
    """Nodes of a partition that are alike."""

    partition: str
    default: bool  # jobs that name no partition come here
    up: bool
    limit: int | None  # seconds
    nodes: int
    cpus: int
    gpus: dict[str, int]  # by type, which is empty where the cluster names none


def build(stack: Stack) -> Site:
    """Raises StackError where this cluster cannot have the allocation."""
    if shutil.which("sinfo"):
        done = subprocess.run(["sinfo", "-h", "-e", "-o", FORMAT], capture_output=True, text=True, timeout=SINFO_SECONDS, check=False)
        if done.returncode == 0:
            for error in errors(stack, groups(done.stdout)):
                raise StackError(f"stacks/Pulumi.{stack.name}.yaml: flotilla:{error}")
        else:
            pulumi.warn(f"the allocation is not compared with the cluster: {(done.stderr.splitlines() or ['sinfo fails'])[-1]}")
    return Site(backend=backend(stack) if stack.dstack else None)


def backend(stack: Stack) -> dict[str, Any]:
    """dstack's backend for this cluster, as its server reads it; the stack's name is the cluster's, which dstack calls a region."""
    slurm, gpu = stack.slurm, stack.fleets[0].gpu
    user, _, address = (slurm.login or "").partition("@")
    host, _, port = address.partition(":")
    partitions = (slurm.partition or "").split(",")
    gpus = bool(gpu and gpu.count)
    cluster = {
        "name": stack.name,
        "hostname": host,
        **({"port": int(port)} if port else {}),
        "user": user,
        "private_key": {"path": str(slurm.identity_file)},
        **({"gpu_partitions": [{"gpu": gpu.name, "partitions": partitions}]} if gpus and gpu else {"cpu_partitions": partitions}),
    }
    return {"type": "slurm", "clusters": [cluster]}


def groups(sinfo: str) -> list[Group]:
    """What `sinfo -h -e -o FORMAT` printed."""
    found = []
    for line in sinfo.splitlines():
        name, up, limit, nodes, cpus, gres = line.split("|")
        bounded = None if limit in ("infinite", "n/a") else seconds(limit)
        found.append(Group(name.rstrip("*"), name.endswith("*"), up == "up", bounded, int(nodes), int(cpus.rstrip("+")), gpus(gres)))
    return found


def gpus(gres: str) -> dict[str, int]:
    """{"h100": 8} of gpu:h100:8(S:0-1),nvme:1; {"": 4} of gpu:4."""
    kinds = [item.split(":") for item in re.sub(r"\([^)]*\)", "", gres).split(",")]
    return {"".join(kind[1:-1]): int(kind[-1]) for kind in kinds if kind[0] == "gpu" and kind[-1].isdigit()}


def errors(stack: Stack, known: list[Group]) -> Iterator[str]:
    """What the cluster does not have, the most basic first, as setting, value and what there is."""
    slurm, fleet = stack.slurm, stack.fleets[0]
    names = sorted({group.partition for group in known})
    wanted = slurm.partition.split(",") if slurm.partition else [group.partition for group in known if group.default]
    for name in wanted:
        if name not in names:
            near = get_close_matches(name, names, n=1)
            guess = f"; did you mean {near[0]}?" if near else ""
            yield f"slurm.partition: {name!r} is not a partition of this cluster{guess} (sinfo shows: {', '.join(names)})"
    if not wanted:
        yield f"slurm.partition: is missing, and this cluster has no default one (sinfo shows: {', '.join(names)})"
    where = f"partition {','.join(dict.fromkeys(wanted))}"
    nodes = [group for group in known if group.partition in wanted]
    if nodes and not any(group.up for group in nodes):
        yield f"slurm.partition: {where} is down"
    limits = [group.limit for group in nodes]
    if slurm.time and None not in limits and seconds(slurm.time) > max(limit for limit in limits if limit is not None):
        yield f"slurm.time: {slurm.time!r} is more than {where} allows; `sinfo -o '%P %l'` shows the limits"
    types = sorted({kind for group in nodes for kind in group.gpus if kind})
    if slurm.gpu_type and slurm.gpu_type not in types:
        yield f"slurm.gpu_type: {slurm.gpu_type!r} is no GPU of {where} (sinfo shows: {', '.join(types) or 'none'})"
    yield from _sizes(stack, nodes, where)
    if (have := sum(group.nodes for group in nodes)) < fleet.nodes:
        yield f"fleets[0].nodes: {fleet.nodes}, but {where} has {have}"


def _sizes(stack: Stack, nodes: list[Group], where: str) -> Iterator[str]:
    """Of one node."""
    fleet, kind = stack.fleets[0], stack.slurm.gpu_type
    count = fleet.gpu.count if fleet.gpu else 0
    most = max((group.gpus.get(kind, 0) if kind else sum(group.gpus.values()) for group in nodes), default=0)
    if nodes and count > most:
        yield f"fleets[0].gpu.count: {count}, but nodes of {where} have {most}{f' of type {kind}' if kind else ''} at most"
    if nodes and fleet.cpus and fleet.cpus > (cpus := max(group.cpus for group in nodes)):
        yield f"fleets[0].cpus: {fleet.cpus}, but nodes of {where} have {cpus} at most"
