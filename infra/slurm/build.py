"""A Slurm cluster as the site: Pulumi creates nothing on it; the scheduler lends its nodes to jobs.

Where `sinfo` is on PATH, which is on the cluster's login nodes, the allocation is compared with what the cluster has.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import pulumi

from stacks.load import StackError
from stacks.schema import Fleet, Stack
from stacks.settings.slurm import ANY, Door, seconds
from stacks.site import Site

SINFO_SECONDS = 30  # slurmctld may be busy
CLUSTERS = ("--clusters=", "--cluster=")  # of slurm.sbatch
FORMAT = "%P|%a|%l|%D|%c|%G|%f"  # sinfo(1): partition, availability, time limit, nodes; CPUs, generic resources, features of each


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
    features: frozenset[str] = frozenset()


def build(stack: Stack) -> Site:
    """Raises StackError where this cluster cannot have the allocation."""
    types: dict[str, str] = {}
    if shutil.which("sinfo"):
        known, why = asked(stack)
        if known:
            if found := [f"stacks/Pulumi.{stack.name}.yaml: flotilla:{error}" for error in unmet(stack, known)]:
                raise StackError("\n".join(found))
            types = gpu_types(stack, known)
        else:
            pulumi.warn(f"the allocation is not compared with the cluster: {why}")
    for fleet in stack.cluster_fleets():
        model = fleet.gpu.name if fleet.gpu else None
        if model and types.get(fleet.name) == "" and stack.slurm.of(fleet.slurm).gpu_type != ANY:
            pulumi.warn(f"fleet {fleet.name!r} does not ask for {model}: sinfo shows no types of GPUs here, only their number")
    return Site(backends=(backend(stack),) if stack.dstack else (), gpu_types=types)


def asked(stack: Stack) -> tuple[list[Group], str]:
    """What the cluster of the stack has, partitions that are hidden too; or why nobody knows."""
    every = [option for slurm in (stack.slurm, *(fleet.slurm for fleet in stack.fleets if fleet.slurm)) for option in slurm.sbatch]
    clusters = [option for option in every if option.startswith(CLUSTERS)][-1:]
    # What a person's own listings show by SINFO_PARTITION and the like is theirs.
    env = {name: value for name, value in os.environ.items() if not name.startswith("SINFO_")}
    command = ["sinfo", "-h", "-a", "-e", "-o", FORMAT, *clusters]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SINFO_SECONDS, check=False, env=env)
        if done.returncode == 0:
            return groups(done.stdout), "sinfo shows no partition"
        return [], (done.stderr.splitlines() or ["sinfo fails"])[-1]
    except subprocess.TimeoutExpired:
        return [], f"sinfo does not answer within {SINFO_SECONDS} s"
    except ValueError as error:
        return [], f"sinfo is not understood: {error}"


def backend(stack: Stack) -> dict[str, Any]:
    """dstack's backend for this cluster, as its server reads it; the stack's name is the cluster's, which dstack calls a region."""
    slurm, gpu = stack.slurm.of(stack.fleets[0].slurm), stack.fleets[0].gpu
    login = Door.of(slurm.login)
    assert login  # stacks/places/slurm.py
    partitions = (slurm.partition or "").split(",")
    gpus = bool(gpu and gpu.count)
    cluster = {
        "name": stack.name,
        "hostname": login.host,
        **({"port": login.port} if login.port else {}),
        "user": login.user,
        "private_key": {"path": str(slurm.identity_file)},
        **({"gpu_partitions": [{"gpu": gpu.name, "partitions": partitions}]} if gpus and gpu else {"cpu_partitions": partitions}),
    }
    return {"type": "slurm", "clusters": [cluster]}


def groups(sinfo: str) -> list[Group]:
    """What `sinfo -h -e -o FORMAT` printed; of several clusters with a line between. Raises ValueError."""
    found = []
    for line in sinfo.splitlines():
        if not line.strip() or line.startswith("CLUSTER:"):
            continue
        name, up, limit, nodes, cpus, gres, features = line.split("|", 6)  # features may have one, too
        words = frozenset(features.split(",")) - {"(null)"}
        found.append(
            Group(
                name.rstrip("*"), name.endswith("*"), up == "up", seconds(limit), count(nodes), count(cpus.rstrip("+")), gpus(gres), words
            )
        )
    return found


def count(text: str) -> int:
    """Of 1K, which is 1024 as sinfo writes it. Raises ValueError."""
    return int(float(text[:-1]) * 1024) if text.endswith("K") else int(text)


def gpus(gres: str) -> dict[str, int]:
    """{"h100": 8} of gpu:h100:8(S:0-1),nvme:1; {"": 4} of gpu:4."""
    kinds = [item.split(":") for item in re.sub(r"\([^)]*\)", "", gres).split(",")]
    return {"".join(kind[1:-1]): int(kind[-1]) for kind in kinds if kind[0] == "gpu" and kind[-1].isdigit()}


def unmet(stack: Stack, known: list[Group]) -> Iterator[str]:
    """What the cluster does not have, fleet by fleet, as setting, value and what there is."""
    taken: dict[str, list[Fleet]] = {}
    for fleet in stack.cluster_fleets():
        wanted = Wanted(stack, fleet, known)
        yield from _partition(wanted)
        yield from _sizes(wanted)
        earlier, have = taken.setdefault(wanted.where, []), sum(group.nodes for group in wanted.nodes)
        others = sum(other.nodes for other in earlier)
        if 0 < have < fleet.nodes + others:
            of = f", of which {others} are taken by {' and '.join(repr(other.name) for other in earlier)}" if earlier else ""
            yield f"{wanted.at}.nodes: {fleet.nodes}, but {wanted.where} has {have}{of}"
        earlier.append(fleet)


class Wanted:
    """A fleet's nodes, as settings and as what the cluster has for them."""

    def __init__(self, stack: Stack, fleet: Fleet, known: list[Group]):
        self.fleet, self.known, self.slurm = fleet, known, stack.slurm.of(fleet.slurm)
        self.at = f"fleets[{stack.fleets.index(fleet)}]"
        self.own = fleet.slurm
        defaults = list(dict.fromkeys(group.partition for group in known if group.default))
        self.partitions = self.slurm.partition.split(",") if self.slurm.partition else defaults
        self.in_partitions = [group for group in known if group.partition in self.partitions]
        features = set(re.split("[&,]", self.slurm.constraint or "")) - {""}
        plain = all(re.fullmatch(r"[\w.-]+", feature) for feature in features)  # else sbatch alone can judge
        self.features = features if plain else set()
        self.nodes = [group for group in self.in_partitions if self.features <= group.features]
        limits = f" with {self.slurm.constraint}" if self.features else ""
        self.where = f"partition {','.join(self.partitions)}{limits}"

    def key(self, name: str) -> str:
        """Where a setting of `Nodes` was read."""
        return f"{self.at}.slurm.{name}" if self.own and self.own.says(name) else f"slurm.{name}"


def _partition(wanted: Wanted) -> Iterator[str]:
    names = sorted({group.partition for group in wanted.known})
    for name in wanted.partitions:
        if name not in names:
            near = get_close_matches(name, names, n=1)
            guess = f"; did you mean {near[0]}?" if near else ""
            key = wanted.key("partition")
            yield f"{key}: {name!r} is not a partition of this cluster{guess} (sinfo shows: {', '.join(names)})"
    if not wanted.partitions:
        yield f"slurm.partition: is missing, and this cluster has no default one (sinfo shows: {', '.join(names)})"
    groups, time = wanted.in_partitions, wanted.slurm.time
    if groups and not any(group.up for group in groups):
        yield f"{wanted.key('partition')}: {wanted.where} is down"
    limits = [group.limit for group in groups]
    most = max((limit for limit in limits if limit is not None), default=0)
    if time and groups and None not in limits and ((wants := seconds(time)) is None or wants > most):
        yield f"slurm.time: {time!r} is more than {wanted.where} allows; `sinfo -o '%P %l'` shows the limits"
    if groups and not wanted.nodes:
        have = ", ".join(sorted({feature for group in groups for feature in group.features})) or "none"
        where = f"partition {','.join(wanted.partitions)}"
        yield f"{wanted.key('constraint')}: {wanted.slurm.constraint!r} are features of no node of {where} (sinfo shows: {have})"


def _sizes(wanted: Wanted) -> Iterator[str]:
    """Of one node."""
    fleet, nodes, where = wanted.fleet, wanted.nodes, wanted.where
    count = fleet.gpu.count if fleet.gpu else 0
    if not nodes:
        return
    try:
        kind = _type(wanted)
    except ValueError as error:
        yield str(error)
        kind = None
    most = max(group.gpus.get(kind, 0) if kind else sum(group.gpus.values()) for group in nodes)
    if kind is not None and count > most:
        yield f"{wanted.at}.gpu.count: {count}, but nodes of {where} have {most}{f' of type {kind}' if kind else ''} at most"
    if fleet.cpus and fleet.cpus > (cpus := max(group.cpus for group in nodes)):
        yield f"{wanted.at}.cpus: {fleet.cpus}, but nodes of {where} have {cpus} at most"


def gpu_types(stack: Stack, known: list[Group]) -> dict[str, str]:
    """The cluster's word for the GPUs of each fleet that has some, by its name; empty where it has none, or any will do."""
    fleets = [fleet for fleet in stack.cluster_fleets() if fleet.gpu and fleet.gpu.count]
    return {fleet.name: _type(Wanted(stack, fleet, known)) for fleet in fleets}


def _type(wanted: Wanted) -> str:
    """Raises ValueError where the cluster's types are others."""
    given, gpu = wanted.slurm.gpu_type, wanted.fleet.gpu
    types = sorted({kind for group in wanted.nodes for kind in group.gpus if kind})
    shown = f"(sinfo shows: {', '.join(types) or 'none'})"
    if given and given != ANY:
        if given not in types:
            raise ValueError(f"{wanted.key('gpu_type')}: {given!r} is no GPU of {wanted.where} {shown}")
        return given
    if given or not gpu or not gpu.count or not gpu.name or not types:
        return ""
    fitting = [kind for kind in types if _names(kind, gpu.name)]
    if len(fitting) != 1:
        problem = f"more than one type of GPU in {wanted.where} is called so" if fitting else f"{wanted.where} has no GPU of that name"
        raise ValueError(f"{wanted.at}.gpu.name: {gpu.name!r}, but {problem} {shown}; {wanted.at}.slurm.gpu_type names the type")
    return fitting[0]


def _names(kind: str, model: str) -> bool:
    """Whether a type such as nvidia_h100_80gb_hbm3 or rtx_4090 names a model: some of its words in a row are H100 or RTX4090."""
    words = re.split(r"[-_.]", kind.lower())
    rows = {"".join(words[start:end]) for end in range(1, len(words) + 1) for start in range(end)}
    return re.sub(r"[-_. ]", "", model.lower()) in rows
