"""The variables by which NCCL and RCCL find the fast network of a fleet, with the reason beside each.

What a library finds by itself is left to it; `LEFT_ALONE` says why. cluster_tasks/environment.py adds the rest of a node's environment.

Sources:
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html (defaults, and since which version)
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-start-nccl.html and https://github.com/aws/aws-ofi-nccl (EFA)
https://docs.cloud.google.com/kubernetes-engine/docs/how-to/gpu-bandwidth-gpudirect-tcpx-autopilot (TCPX, TCPXO; the values are those
of dstack's guide to clusters with these fabrics, measured there with NCCL's tests)
https://rocm.docs.amd.com/en/latest/how-to/rocm-for-ai/training/ (AMD)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stacks import places
from stacks.places import machine_types
from stacks.schema import Fleet, Stack

Kind = Literal["none", "infiniband", "roce", "ethernet", "efa", "tcpx", "tcpxo"]


@dataclass(frozen=True)
class Setting:
    """A variable's value, or None where it is taken from the shell of the person who starts the cluster."""

    value: str | None
    reason: str
    origin: str  # what asks for it, in the words of the stack file


FLOOR = "FLOTILLA_BANDWIDTH_FLOOR"  # cluster_tasks/checks/command.py reads it
CHUNK = str(512 * 1024)  # bytes
CARD_CORES = "each card is served by processors of its own NUMA node"
TUNED = "tuned for this plugin, which moves data in chunks of this kind"

# {fabric: {variable: (value, reason)}}
FABRICS: dict[Kind, dict[str, tuple[str, str]]] = {
    "none": {},
    "infiniband": {},
    "roce": {},
    "ethernet": {
        "NCCL_IB_DISABLE": ("1", "cards that offer RoCE on a network which drops packets make NCCL hang; TCP does not"),
    },
    "efa": {
        "FI_PROVIDER": ("efa", "without EFA in the container libfabric fails at once, in place of falling back to TCP"),
        "FI_EFA_USE_HUGE_PAGE": ("0", "data loaders fork, and memory in huge pages does not survive that"),
    },
    "tcpxo": {
        "NCCL_FASTRAK_CTRL_DEV": ("enp0s12", "the card of the main network, on which the plugin's processes meet"),
        "NCCL_FASTRAK_IFNAME": (
            "enp6s0,enp7s0,enp13s0,enp14s0,enp134s0,enp135s0,enp141s0,enp142s0",
            "the eight cards of the fabric, one beside each GPU",
        ),
        "NCCL_FASTRAK_LLCM_DEVICE_DIRECTORY": ("/dev/aperture_devices", "where the container sees the memory that cards write to"),
        "NCCL_SOCKET_IFNAME": ("enp0s12", "NCCL meets on the card on which the plugin does"),
    },
    "tcpx": {
        "LD_LIBRARY_PATH": ("/usr/local/tcpx/lib64:/usr/local/nvidia/lib64", "the plugin, and the NCCL that it was built for"),
        "NCCL_ALGO": ("Ring", "the plugin has its bandwidth in rings; trees use one card at a time"),
        "NCCL_BUFFSIZE": (str(4 * 1024 * 1024), TUNED),
        "NCCL_CROSS_NIC": ("0", "a card reaches its counterpart in its own network alone"),
        "NCCL_DYNAMIC_CHUNK_SIZE": (CHUNK, TUNED),
        "NCCL_GPUDIRECTTCPX_CTRL_DEV": ("eth0", "the card of the main network, on which the plugin's processes meet"),
        "NCCL_GPUDIRECTTCPX_PROGRAM_FLOW_STEERING_WAIT_MICROS": ("50000", "cards need this long to steer a new flow to a GPU"),
        "NCCL_GPUDIRECTTCPX_RX_BINDINGS": (
            "eth1:22-35,126-139;eth2:22-35,126-139;eth3:74-87,178-191;eth4:74-87,178-191",
            f"receiving: {CARD_CORES}",
        ),
        "NCCL_GPUDIRECTTCPX_SOCKET_IFNAME": ("eth1,eth2,eth3,eth4", "the four cards of the fabric"),
        "NCCL_GPUDIRECTTCPX_TX_BINDINGS": (
            "eth1:8-21,112-125;eth2:8-21,112-125;eth3:60-73,164-177;eth4:60-73,164-177",
            f"sending: {CARD_CORES}",
        ),
        "NCCL_GPUDIRECTTCPX_UNIX_CLIENT_PREFIX": ("/run/tcpx", "where the host's receive-datapath manager listens"),
        "NCCL_NET_GDR_LEVEL": ("PIX", "data goes straight to a GPU where card and GPU share a PCIe switch"),
        "NCCL_NSOCKS_PERTHREAD": ("4", "one TCP flow does not fill a card"),
        "NCCL_P2P_NET_CHUNKSIZE": (CHUNK, TUNED),
        "NCCL_P2P_NVL_CHUNKSIZE": (str(1024 * 1024), TUNED),
        "NCCL_P2P_PCI_CHUNKSIZE": (CHUNK, TUNED),
        "NCCL_P2P_PXN_LEVEL": ("0", "no detour over NVLink to another GPU's card"),
        "NCCL_PROTO": ("Simple", "the others need writes of 128 bytes at once, which TCP does not promise"),
        "NCCL_SOCKET_IFNAME": ("eth0", "NCCL meets on the card on which the plugin does"),
        "NCCL_SOCKET_NTHREADS": ("1", "the plugin has threads of its own"),
    },
}

AMD = {
    "GPU_MAX_HW_QUEUES": ("2", "one queue for kernels and one for RCCL; with the default of 4 they do not overlap"),
    "HSA_NO_SCRATCH_RECLAIM": ("1", "giving scratch memory back and taking it again stalls kernels, RCCL's among them"),
    "TORCH_NCCL_HIGH_PRIORITY": ("1", "collectives start before kernels that already wait"),
}

# What people set elsewhere and is not set here.
LEFT_ALONE: dict[Kind, dict[str, str]] = {
    "infiniband": {
        "NCCL_IB_HCA": "all active devices are used; where storage has its own, list the GPUs' in fabric.hcas",
        "NCCL_NET_GDR_LEVEL": "NCCL knows the PCIe topology",
    },
    "roce": {
        "NCCL_IB_HCA": "all active devices are used; where storage has its own, list the GPUs' in fabric.hcas",
        "NCCL_IB_GID_INDEX": "found since NCCL 2.21, also by RCCL that is as new; for older ones fabric.gid_index, mostly 3",
        "NCCL_IB_TC": "the switches' own choice: fabric.traffic_class where they keep a class lossless",
    },
    "efa": {
        "FI_EFA_USE_DEVICE_RDMA": "on by default where the hardware has it, since libfabric 1.18",
        "FI_EFA_FORK_SAFE": "set by the plugin, aws-ofi-nccl, where the kernel needs it",
        "NCCL_PROTO": "the plugin's tuner chooses; a fixed one costs bandwidth",
        "LD_LIBRARY_PATH": "EFA's installer tells ld.so where libfabric and the plugin are; the image must contain them",
    },
    "tcpxo": {"NCCL_ALGO": "nccl-env-profile-ll128.sh, which comes with the plugin, sets algorithms, protocols and buffers"},
}


def kind(stack: Stack, fleet: Fleet) -> Kind:
    """The fabric that a fleet's nodes share. `none` where a stack has a single node, which talks to nobody."""
    if sum(fleet.nodes for fleet in stack.fleets) == 1:
        return "none"
    if fleet.fabric is not None:
        return fleet.fabric.kind
    if fleet.machine is not None and places.cloud_of(stack):
        return places.machine(stack.cloud, fleet.machine).fabric
    return "none"


def variables(stack: Stack, fleet: Fleet) -> dict[str, Setting]:
    """What a fleet's fabric and GPUs ask for, by variable."""
    found = kind(stack, fleet)
    origin = f"machine {fleet.machine}, fabric {found}" if fleet.machine else f"fleet {fleet.name}, fabric {found}"
    settings = {name: Setting(*known, origin) for name, known in FABRICS[found].items()}
    if found != "none":
        settings |= _devices(fleet)
    if fleet.gpu is not None and fleet.gpu.count and fleet.gpu.vendor == "amd":
        settings |= {name: Setting(*known, f"fleet {fleet.name}, gpu.vendor amd") for name, known in AMD.items()}
    if (least := floor(stack, fleet)) is not None:
        reason = "GB/s; the checks want it of an all-reduce, as less means that NCCL has not found the fabric"
        settings[FLOOR] = Setting(str(least), reason, origin)
    return settings


def floor(stack: Stack, fleet: Fleet) -> float | None:
    """GB/s of bus bandwidth per node below which the fabric does not work as it should; None where that is not known."""
    if kind(stack, fleet) == "none":
        return None
    if fleet.fabric is not None:
        return machine_types.nccl_floor(fleet.fabric.bandwidth or 0, fleet.gpu.name if fleet.gpu else None)
    assert fleet.machine  # else there is no fabric
    return places.machine(stack.cloud, fleet.machine).nccl_floor


def _devices(fleet: Fleet) -> dict[str, Setting]:
    """What the fleet's own fabric says of its RDMA devices."""
    fabric, found = fleet.fabric, {}
    if fabric is None:
        return found
    if fabric.hcas:
        exactly = "these and no others; without = NCCL takes mlx5_1 for mlx5_10 too"
        found["NCCL_IB_HCA"] = Setting("=" + ",".join(fabric.hcas), exactly, "fabric.hcas")
    if fabric.gid_index is not None:
        found["NCCL_IB_GID_INDEX"] = Setting(str(fabric.gid_index), "the row of the GID table that is routed", "fabric.gid_index")
    if fabric.traffic_class is not None:
        found["NCCL_IB_TC"] = Setting(str(fabric.traffic_class), "the class that the switches keep lossless", "fabric.traffic_class")
    return found
