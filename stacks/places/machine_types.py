"""What a cloud's machine type is: GPUs, memory, disks, network cards, fabric. The types that are known stand in stacks/places/<cloud>.py.

Floors of NCCL's bus bandwidth (`Machine.nccl_floor`) are 0.4 of the fabric's line rate. The lowest that were published of a
fabric that worked:
https://github.com/openucx/ucx/issues/10854 (A3 High: more than 40 of 100 GB/s)
https://github.com/GoogleCloudPlatform/ai-infra-cluster-provisioning/pull/376 (A3 Mega: 89 of 200 GB/s; dstack's example has 188)
https://github.com/NVIDIA/nccl/issues/527 (four p4d: 30 of 50 GB/s)
and of one that did not, but fell back to TCP:
https://github.com/dstackai/dstack/issues/2447 (A3 High: 37 GB/s), https://github.com/skypilot-org/skypilot/issues/3592 (19 GB/s)
GPUs without NVLink go through PCIe on their way out, so half of that is asked of them.
How it is measured: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md (busbw of all_reduce_perf at 1 GB and more)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Fabric = Literal["none", "efa", "tcpx", "tcpxo", "roce"]


@dataclass(frozen=True)
class Nic:
    """One network interface of a machine with EFA: its card, its index on the card, and what it carries (IP, RDMA or both)."""

    card: int
    device: int
    kind: Literal["interface", "efa", "efa-only"]


@dataclass(frozen=True)
class Networks:
    """What a fabric needs beside the main network."""

    vpcs: int = 0  # networks of their own with one subnet and one gVNIC each
    rdma_subnets: int = 0  # subnets, and RDMA interfaces, of one more network that has the RoCE profile
    mtu: int = 1460  # bytes; the default of a network without fabric


NVLINK = ("A100", "H100", "H200", "B200", "B300")
NETWORKS: dict[Fabric, Networks] = {
    "none": Networks(),
    "tcpx": Networks(vpcs=4, mtu=8244),
    "tcpxo": Networks(vpcs=8, mtu=8244),
    "roce": Networks(vpcs=1, rdma_subnets=8, mtu=8896),
}


@dataclass(frozen=True)
class Machine:
    """A machine type. `gpu` is the model as dstack names it, None for machines without GPUs."""

    cloud: str  # the place that rents it out
    name: str
    cpus: int  # vCPUs
    memory: int  # GiB
    gpu: str | None = None
    gpus: int = 0
    gpu_memory: int = 0  # GB per GPU, rounded as dstack does
    nvme: int = 0  # GB of local disks, in all
    fabric: Fabric = "none"
    bandwidth: int = 0  # Gbit/s of the fabric, in one direction
    cards: int = 1  # network cards that carry EFA
    efa: int = 0  # EFA interfaces at most
    on_demand: bool = True  # may be had without reservation, spot or flex-start
    hyperdisk: bool = False  # takes Hyperdisk alone, no Persistent Disk

    @property
    def nccl_floor(self) -> float | None:
        """GB/s of bus bandwidth per node below which the fabric does not work; None where there is no fabric."""
        return nccl_floor(self.bandwidth, self.gpu)

    @property
    def networks(self) -> Networks:
        """The networks that the fabric needs beside the main one; those of EFA need none."""
        return NETWORKS.get(self.fabric, Networks())

    def wired(self, nodes: int) -> Fabric:
        """What so many of them are wired to; one node needs nothing."""
        return self.fabric if nodes > 1 else "none"

    def nics(self) -> tuple[Nic, ...]:
        """Interfaces of a machine that uses all EFA there is, the primary one first.

        One IP address per node: the primary interface has it, the others carry RDMA alone (`efa-only`). Where every card has
        EFA, card 0 carries one beside the primary interface. Of cards above 0 the guide has `efa-only` at device index 0, and at 1
        what carries IP; for p6-b300: https://github.com/aws/aws-parallelcluster/issues/7143.
        """
        if self.efa == 0:
            return (Nic(0, 0, "interface"),)
        if self.cards == 1:
            return (Nic(0, 0, "efa"),)
        beside = (Nic(0, 1, "efa-only"),) if self.efa == self.cards else ()
        return (Nic(0, 0, "interface"), *beside, *(Nic(card, 0, "efa-only") for card in range(1, self.cards)))


def nccl_floor(bandwidth: int, gpu: str | None) -> float | None:
    """GB/s of bus bandwidth that a fabric of so many Gbit/s must reach; None where that is 0, unknown."""
    return round((0.4 if gpu in NVLINK else 0.2) * bandwidth / 8, 1) if bandwidth else None
