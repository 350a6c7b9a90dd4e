"""What must hold on a cluster before a job starts: facts in, errors out. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cluster_tasks.checks import facts as node_facts
from cluster_tasks.checks.facts import Facts
from cluster_tasks.checks.links import SHARED, Reach, Speed
from cluster_tasks.node.checks import device_error

SHM_GIB, OPEN_FILES, PROCESSES = 1.0, 4096, 4096
SKEW_SECONDS, SKEW_NOTED = 5.0, 0.5  # a failure; worth a word
BRIDGES = ("docker", "br-", "virbr", "veth", "cni", "flannel")  # interfaces that end at their own machine
COLLECTIVES = {"nccl", "cuda", "rocm"}


@dataclass(frozen=True)
class Expected:
    """What the scheduler said, or the command line; None: as many as there are."""

    addresses: tuple[str, ...] | None
    nodes: int | None
    gpus: list[int] | None  # of each node in order of rank; one number where they are alike
    free: float  # GiB in the folders that runs write to
    floor: float | None  # GB/s of bus bandwidth


@dataclass(frozen=True)
class CheckError:
    """An error, or with `hard` False a note; `node` is a rank, None where it is of the cluster."""

    hard: bool
    node: int | None
    text: str
    fix: str


@dataclass(frozen=True)
class Measured:
    """What the nodes found, all in order of rank."""

    facts: list[Facts]
    reach: list[list[Reach]]  # [from][to]; empty where it was not tried
    markers: list[dict[str, list[int]]]  # ranks whose markers are seen, by folder
    speed: list[Speed]


def check_errors(expected: Expected, found: Measured) -> list[CheckError]:
    """All errors, then all notes."""
    all_of = [
        *_present(expected, found.facts),
        *_counted(expected, found.facts),
        *(error for facts in found.facts for error in _node(expected, facts)),
        *_alike(found.facts),
        *_addresses(found.facts),
        *_reach(found.facts, found.reach),
        *_shared(found.facts, found.markers),
        *_speed(expected, found.speed),
    ]
    return sorted(all_of, key=lambda error: not error.hard)


def _present(expected: Expected, facts: Sequence[Facts]) -> Iterator[CheckError]:
    here = {node.address for node in facts}
    gone = [address for address in expected.addresses or () if address not in here]
    start = "read that node's log of the agent; flotilla status STACK, dstack ps or squeue say whether it runs"
    for address in gone:
        yield CheckError(True, None, f"node {address} is missing", start)
    if not gone and expected.nodes is not None and len(facts) < expected.nodes:
        yield CheckError(True, None, f"{len(facts)} of {expected.nodes} nodes are there", start)


def _counted(expected: Expected, facts: Sequence[Facts]) -> Iterator[CheckError]:
    """GPUs, which may be as many as each node's kind has."""
    counts = expected.gpus or []
    if len(counts) > 1 and len(counts) != len(facts):
        yield CheckError(
            True, None, f"GPUs are given for {len(counts)} nodes, {len(facts)} are there", "--gpus: one number, or one per node"
        )
        return
    for node, wanted in zip(facts, counts * len(facts) if len(counts) == 1 else counts, strict=False):
        there = len(node.gpus) if node.offered is None else node.offered
        if there < wanted:
            yield CheckError(True, node.rank, f"{there} of {wanted} GPUs", "nvidia-smi or amd-smi on the node shows which one is lost")


def _node(expected: Expected, node: Facts) -> Iterator[CheckError]:
    """What can be said of a node by itself."""
    yield from _gpus(node)
    yield from _cards(node)
    if node.shm < SHM_GIB:
        fix = "flotilla:task.shm_size, such as 64GB; docker run --shm-size"
        yield CheckError(True, node.rank, f"/dev/shm has {node.shm:.2g} GB, where Ray's object store and NCCL need gigabytes", fix)
    if 0 <= node.open_files < OPEN_FILES:
        yield CheckError(
            True, node.rank, f"a process may open {node.open_files} files, Ray needs {OPEN_FILES}", "ulimit -n 65536, LimitNOFILE="
        )
    if 0 <= node.processes < PROCESSES:
        text = f"the user may have {node.processes} processes and threads"
        yield CheckError(False, node.rank, f"{text}; Ray and torch start hundreds per job", "ulimit -u, TasksMax=")
    for disk in node.disks:
        if disk.error:
            fix = "free space, or let the user of the containers (flotilla:task.user) write there"
            yield CheckError(True, node.rank, f"{disk.use} in {disk.path}: {disk.error}", fix)
        elif disk.free < expected.free:
            text = f"{disk.use} in {disk.path}: {disk.free:.1f} GB free, {expected.free:g} wanted (--free)"
            yield CheckError(True, node.rank, text, "free space, or name another folder")


def _gpus(node: Facts) -> Iterator[CheckError]:
    for name in node_facts.VISIBLE:
        devices = node.environment.get(name, "")
        if error := device_error(devices):
            yield CheckError(True, node.rank, f"{name}={devices} {error}", "list each GPU of the node once, or unset it")
    outer, inner = node.environment.get("ROCR_VISIBLE_DEVICES"), node.environment.get("HIP_VISIBLE_DEVICES")
    if outer and inner:  # the inner ones count what the outer one lets through
        last = max((int(name) for name in inner.split(",") if name.strip().isdigit()), default=-1)
        if last >= len(outer.split(",")):
            text = f"HIP_VISIBLE_DEVICES={inner} counts within ROCR_VISIBLE_DEVICES={outer}, where there is no GPU {last}"
            yield CheckError(True, node.rank, text, "set one of the two; Ray sets HIP_VISIBLE_DEVICES itself")
    if node.offered and len(node.gpus) < node.offered:
        text = f"Ray offers {node.offered} GPUs, the driver shows {len(node.gpus)}"
        yield CheckError(True, node.rank, text, "nvidia-smi or amd-smi on the node; is the container started with GPUs?")


def _cards(node: Facts) -> Iterator[CheckError]:
    """RDMA devices and interfaces, against what NCCL, gloo and libfabric are set to use."""
    names = {card.name for card in node.cards}
    for card in node.cards:
        if card.state and card.state != "ACTIVE":
            yield CheckError(False, node.rank, f"RDMA device {card.name} is {card.state}", "its cable or switch port; NCCL leaves it out")
    if node.cards and node.locked_memory >= 0:
        text = f"{node.locked_memory >> 10} KiB may be locked in memory, but RDMA locks all its buffers"
        yield CheckError(True, node.rank, text, "ulimit -l unlimited, LimitMEMLOCK=infinity, docker run --ulimit memlock=-1")
    if node.cards and not node.verbs and node.environment.get("NCCL_IB_DISABLE") != "1":
        text = "there are RDMA cards but no /dev/infiniband/uverbs*, so NCCL falls back to TCP"
        yield CheckError(True, node.rank, text, "docker run --device /dev/infiniband; dstack does it by itself where the host has it")
    wanted = node.environment.get("NCCL_IB_HCA", "")
    if wanted.startswith("="):
        lost = [name for name in wanted[1:].split(",") if name.partition(":")[0] not in names]
        if lost:
            text = f"NCCL_IB_HCA={wanted}, but there is no {', '.join(lost)} (there are: {', '.join(sorted(names)) or 'none'})"
            yield CheckError(True, node.rank, text, "flotilla:fleets[].fabric.hcas; is /dev/infiniband in the container?")
    if node.environment.get("FI_PROVIDER") == "efa" and not node.cards:
        yield CheckError(True, node.rank, "FI_PROVIDER=efa, but there is no EFA device", "is /dev/infiniband in the container?")
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = node.environment.get(name, "")
        if value and not value.startswith("^") and not any(_chosen(value, interface) for interface in node.interfaces):
            there = ", ".join(node.interfaces)
            yield CheckError(True, node.rank, f"{name}={value} is no interface here ({there})", "leave it out; the node agent chooses")


def _chosen(value: str, interface: str) -> bool:
    """Whether NCCL takes an interface: a name after =, else the start of one."""
    names = value.removeprefix("=").split(",")
    return interface in names if value.startswith("=") else any(interface.startswith(name) for name in names)


def _alike(facts: Sequence[Facts]) -> Iterator[CheckError]:
    """What must be the same on all nodes; drivers and links only among nodes with the same GPUs."""
    for name in sorted({name for node in facts for name in node.versions} - {"driver"}):
        with_gpus = [node for node in facts if node.gpus] or facts  # a head without GPUs needs no NCCL
        of = with_gpus if name in COLLECTIVES else facts
        yield from _differs(name, {node.rank: node.versions.get(name, "not installed") for node in of}, "use the same image on all nodes")
    for models in {node.gpus for node in facts if node.gpus}:
        of = [node for node in facts if node.gpus == models]
        yield from _differs("driver", {node.rank: node.versions.get("driver", "unknown") for node in of}, "install the same driver")
        wires = {node.rank: ", ".join(f"{count} x {kind}" for kind, count in sorted(node.gpu_links.items())) or "none" for node in of}
        yield from _differs("GPU links", wires, "nvidia-smi topo -m, nvidia-smi nvlink -s: a link may be down")
        cards = {node.rank: f"{sum(card.state == 'ACTIVE' for card in node.cards)} active" for node in of}
        yield from _differs("RDMA devices", cards, "ibstat on the nodes that have fewer")


def _differs(what: str, values: dict[int, str], fix: str) -> Iterator[CheckError]:
    if len(set(values.values())) > 1:
        said = "; ".join(f"{value} on node {_ranks([r for r in values if values[r] == value])}" for value in dict.fromkeys(values.values()))
        yield CheckError(True, None, f"{what} differs: {said}", fix)


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"


def _addresses(facts: Sequence[Facts]) -> Iterator[CheckError]:
    one_machine = len({node.boot for node in facts}) == 1
    fix = "--network of the node agent (flotilla:fleets[].ssh.network) names the network that all nodes share"
    for node in facts:
        if node.interface is None:
            yield CheckError(True, node.rank, f"no interface has the node's address {node.address}", fix)
        elif not one_machine and (node.interface == "lo" or node.interface.startswith(BRIDGES)):
            yield CheckError(True, node.rank, f"{node.address} is on {node.interface}, which other machines do not reach", fix)


def _reach(facts: Sequence[Facts], reach: Sequence[Sequence[Reach]]) -> Iterator[CheckError]:
    for source, row in zip(facts, reach, strict=False):
        lost = [(target, link.error) for target, link in zip(facts, row, strict=True) if link.error]
        if lost:
            targets = ", ".join(f"{target.rank} ({target.address})" for target, _ in lost[:8])
            fix = "a firewall or security group; nodes need all ports of one another, as Ray and NCCL choose theirs freely"
            yield CheckError(True, source.rank, f"cannot reach node {targets}: {lost[0][1]}", fix)
    for target, link in zip(facts, reach[0] if reach else [], strict=False):
        apart = abs(link.skew) - link.seconds / 2
        if not link.error and apart > SKEW_NOTED:
            side = "ahead of" if link.skew > 0 else "behind"
            text = f"its clock is {abs(link.skew):.1f} s {side} node 0's"
            yield CheckError(apart > SKEW_SECONDS, target.rank, text, "chronyc tracking, timedatectl: fix its time service (NTP)")


def _shared(facts: Sequence[Facts], markers: Sequence[dict[str, list[int]]]) -> Iterator[CheckError]:
    fixes = {
        "checkpoints": "flotilla:checkpoints.kind shared, bucket, lustre or filestore; else a run must stay on one node",
        "cache": "flotilla:cache.path on a shared file system; else every node downloads every model",
    }
    for use in SHARED:
        writable = {node.rank for node in facts if any(disk.use == use and not disk.error for disk in node.disks)}
        blind = [node.rank for node, seen in zip(facts, markers, strict=False) if not writable <= set(seen.get(use, []))]
        alone = sorted(writable.intersection(blind))
        if alone:
            yield CheckError(False, None, f"the folder of the {use} is not the same on all nodes (node {_ranks(alone)})", fixes[use])


def _speed(expected: Expected, speed: Sequence[Speed]) -> Iterator[CheckError]:
    for rank, measured in enumerate(speed):
        if measured.error:
            yield CheckError(
                True, rank, f"bandwidth could not be measured: {measured.error}", "NCCL_DEBUG=INFO says why; so does the node's log"
            )
    loaded = {rank: measured.library for rank, measured in enumerate(speed) if measured.library}
    yield from _differs("NCCL or RCCL that torch loads", loaded, "use the same image on all nodes; LD_LIBRARY_PATH and LD_PRELOAD choose")
    known = [measured.all_reduce for measured in speed if measured.all_reduce is not None]
    if expected.floor is not None and known and min(known) < expected.floor:
        text = f"all-reduce reaches {min(known):.3g} GB/s, at least {expected.floor:g} are to be had"
        fix = "NCCL_DEBUG=INFO: NET/Socket where NET/IB, NET/OFI or FasTrak should stand means that the fabric is not used"
        yield CheckError(True, None, text, fix)
