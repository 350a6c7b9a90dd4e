"""What a node boots: its image, and ready.sh with what is particular to the stack in front."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from infra.shell import function, local_disks
from stacks.dstack_api import get_backend_specific_commands_tcpxo
from stacks.places.machine_types import Fabric, Machine
from stacks.schema import Fleet
from stacks.settings.cloud import Access

# With NVIDIA's driver and the RDMA stack: https://docs.cloud.google.com/compute/docs/images/os-details#ubuntu_accelerator
GPU_IMAGE = "projects/ubuntu-os-accelerator-images/global/images/family/ubuntu-accelerator-2204-amd64-with-nvidia-580"
CPU_IMAGE = "projects/ubuntu-os-cloud/global/images/family/ubuntu-2204-lts"
TCPXO_IMAGE = "projects/dstack/global/images/dstack-a3mega-5"  # dstack's own; no other public one has GPUDirect-TCPXO
# Metrics of machine and GPUs, and the system's log: https://docs.cloud.google.com/monitoring/agent/ops-agent/installation
MONITORING = (
    "systemctl is-active --quiet google-cloud-ops-agent && return",
    "curl -fsSLo /tmp/ops-agent.sh https://dl.google.com/cloudagents/add-google-cloud-ops-agent-repo.sh",
    "bash /tmp/ops-agent.sh --also-install --version=2.*.*",
)
READY = Path(__file__).with_name("ready.sh")
DATAPATH = "receive-datapath-manager"  # the container of GPUDirect-TCPXO that must run beside every job


def image(fleet: Fleet, machine: Machine) -> str:
    """The fleet's own image, or the one for the machine; a family stands for the newest at the time a node is made."""
    if fleet.image:
        return fleet.image
    if machine.fabric == "tcpxo":
        return TCPXO_IMAGE
    return GPU_IMAGE if machine.gpus else CPU_IMAGE


def script(access: Access, mount: Sequence[str], folder: str, fabric: Sequence[str], machine: Machine, monitor: Sequence[str] = ()) -> str:
    """A bash script; `mount`, `fabric` and `monitor` are shell lines, the first mount `folder`, if any, the last start an agent."""
    lines = ["#!/bin/bash", f"user={access.user}", f"public_key={shlex.quote(access.public_key.strip())}"]
    lines.append(f"checkpoints={shlex.quote(folder) if mount else ''}")
    lines += [*function("mount_checkpoints", mount), *function("start_fabric", fabric), *function("start_monitoring", monitor)]
    return "\n".join(lines) + f"\n{local_disks(machine)}{READY.read_text()}"


def fabric_lines(fabric: Fabric, own_image: bool) -> list[str]:
    """What starts the fabric on dstack's image for A3 Mega, in dstack's own words; an image of yours does it itself."""
    if fabric != "tcpxo" or own_image:
        return []
    return [f"docker rm --force {DATAPATH} 2>/dev/null || true", *get_backend_specific_commands_tcpxo()]
