"""Machine types of AWS and GCP that GPU fleets are made of: GPUs, memory, disks, network cards, fabric.

Sources of the figures:
https://docs.aws.amazon.com/ec2/latest/instancetypes/ac.html (vCPUs, memory, GPUs, NVMe)
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa.html#efa-instance-types (EFA interfaces)
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-acc-inst-types.html (which network card carries what)
https://docs.cloud.google.com/compute/docs/accelerator-optimized-machines (machine types, what each may be bought as)
https://docs.cloud.google.com/compute/docs/gpus/gpu-network-bandwidth (network interfaces and their bandwidth)
https://docs.cloud.google.com/cluster-toolkit/docs/machine-learning/a3-mega-enable-gpudirect-tcpxo (networks, MTU)

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
from difflib import get_close_matches
from functools import partial
from typing import Any, Literal

Cloud = Literal["aws", "gcp"]
Fabric = Literal["none", "efa", "tcpx", "tcpxo", "roce"]


@dataclass(frozen=True)
class Nic:
    """One network interface of an AWS instance: its card, its index on the card, and what it carries (IP, RDMA or both)."""

    card: int
    device: int
    kind: Literal["interface", "efa", "efa-only"]


@dataclass(frozen=True)
class Networks:
    """What a GCP fabric needs beside the main network."""

    vpcs: int = 0  # networks of their own with one subnet and one gVNIC each
    rdma_subnets: int = 0  # subnets, and RDMA interfaces, of one more network that has the RoCE profile
    mtu: int = 1460  # bytes; GCP's default


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

    cloud: Cloud
    name: str
    cpus: int  # vCPUs
    memory: int  # GiB
    gpu: str | None = None
    gpus: int = 0
    gpu_memory: int = 0  # GB per GPU, rounded as dstack does
    nvme: int = 0  # GB of local disks, in all
    fabric: Fabric = "none"
    bandwidth: int = 0  # Gbit/s of the fabric, in one direction
    cards: int = 1  # AWS network cards
    efa: int = 0  # EFA interfaces at most
    on_demand: bool = True  # may be had without reservation, spot or flex-start
    hyperdisk: bool = False  # takes GCP's Hyperdisk alone, no Persistent Disk

    @property
    def nccl_floor(self) -> float | None:
        """GB/s of bus bandwidth per node below which the fabric does not work; None where there is no fabric."""
        return nccl_floor(self.bandwidth, self.gpu)

    @property
    def networks(self) -> Networks:
        """The networks that the fabric needs beside the main one; only GCP's need some."""
        return NETWORKS.get(self.fabric, Networks())

    def nics(self) -> tuple[Nic, ...]:
        """Interfaces of an AWS instance that uses all EFA there is, the primary one first.

        One IP address per node: the primary interface has it, the others carry RDMA alone (`efa-only`). Where every card has
        EFA, card 0 carries one beside the primary interface. Of cards above 0 AWS's guide has `efa-only` at device index 0, and at 1
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


def machine(cloud: Cloud, name: str) -> Machine:
    """The machine type of that name. Raises ValueError, which names the nearest."""
    if (cloud, name) in MACHINES:
        return MACHINES[cloud, name]
    names = [one.name for one in MACHINES.values() if one.cloud == cloud]
    other = next((one.cloud for one in MACHINES.values() if one.name == name), None)
    if other is not None:
        raise ValueError(f"{name!r} is a machine type of {other}, not of {cloud} (known: {', '.join(names)})")
    near = get_close_matches(name, names, n=1)
    guess = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(f"{name!r} is no {cloud} machine type in stacks/machines.py{guess} (known: {', '.join(names)})")


def _aws(name: str, cpus: int, memory: int, *gpu: Any, efa: int = 0, **rest: Any) -> Machine:
    return Machine("aws", name, cpus, memory, *gpu, fabric="efa" if efa else "none", efa=efa, **rest)


_gcp = partial(Machine, "gcp")

# fmt: off
_TABLE = (
    #     name        vCPU  GiB  GPU, count, GB each, NVMe GB
    _aws("p6-b300.48xlarge", 192, 4096, "B300", 8, 270, 30400, bandwidth=6400, cards=17, efa=16),
    _aws("p6-b200.48xlarge", 192, 2048, "B200", 8, 180, 30400, bandwidth=3200, cards=8, efa=8),
    _aws("p5en.48xlarge", 192, 2048, "H200", 8, 141, 30400, bandwidth=3200, cards=16, efa=16),
    _aws("p5e.48xlarge", 192, 2048, "H200", 8, 141, 30400, bandwidth=3200, cards=32, efa=32),
    _aws("p5.48xlarge", 192, 2048, "H100", 8, 80, 30400, bandwidth=3200, cards=32, efa=32),
    _aws("p5.4xlarge", 16, 256, "H100", 1, 80, 3800, bandwidth=100, efa=1),
    _aws("p4de.24xlarge", 96, 1152, "A100", 8, 80, 8000, bandwidth=400, cards=4, efa=4),
    _aws("p4d.24xlarge", 96, 1152, "A100", 8, 40, 8000, bandwidth=400, cards=4, efa=4),
    _aws("g6e.48xlarge", 192, 1536, "L40S", 8, 48, 7600, bandwidth=400, cards=4, efa=4),
    _aws("g6e.24xlarge", 96, 768, "L40S", 4, 48, 3800, bandwidth=200, cards=2, efa=2),
    _aws("g6e.16xlarge", 64, 512, "L40S", 1, 48, 1900, bandwidth=35, efa=1),
    _aws("g6e.12xlarge", 48, 384, "L40S", 4, 48, 3800, bandwidth=100, efa=1),
    _aws("g6e.8xlarge", 32, 256, "L40S", 1, 48, 900, bandwidth=25, efa=1),
    _aws("g6e.4xlarge", 16, 128, "L40S", 1, 48, 600),
    _aws("g6e.2xlarge", 8, 64, "L40S", 1, 48, 450),
    _aws("g6e.xlarge", 4, 32, "L40S", 1, 48, 250),
    _aws("g6.48xlarge", 192, 768, "L4", 8, 24, 7520, bandwidth=100, efa=1),
    _aws("g6.24xlarge", 96, 384, "L4", 4, 24, 3760, bandwidth=50, efa=1),
    _aws("g6.16xlarge", 64, 256, "L4", 1, 24, 1880, bandwidth=25, efa=1),
    _aws("g6.12xlarge", 48, 192, "L4", 4, 24, 3760, bandwidth=40, efa=1),
    _aws("g6.8xlarge", 32, 128, "L4", 1, 24, 900, bandwidth=25, efa=1),
    _aws("g6.4xlarge", 16, 64, "L4", 1, 24, 600),
    _aws("g6.2xlarge", 8, 32, "L4", 1, 24, 450),
    _aws("g6.xlarge", 4, 16, "L4", 1, 24, 250),
    _aws("g5.48xlarge", 192, 768, "A10G", 8, 24, 7600, bandwidth=100, efa=1),
    _aws("g5.24xlarge", 96, 384, "A10G", 4, 24, 3800, bandwidth=50, efa=1),
    _aws("g5.16xlarge", 64, 256, "A10G", 1, 24, 1900, bandwidth=25, efa=1),
    _aws("g5.12xlarge", 48, 192, "A10G", 4, 24, 3800, bandwidth=40, efa=1),
    _aws("g5.8xlarge", 32, 128, "A10G", 1, 24, 900, bandwidth=25, efa=1),
    _aws("g5.4xlarge", 16, 64, "A10G", 1, 24, 600),
    _aws("g5.2xlarge", 8, 32, "A10G", 1, 24, 450),
    _aws("g5.xlarge", 4, 16, "A10G", 1, 24, 250),
    _aws("m7i.4xlarge", 16, 64),
    _aws("m7i.2xlarge", 8, 32),
    _aws("m7i.xlarge", 4, 16),
    _gcp("a4-highgpu-8g", 224, 3968, "B200", 8, 180, 12000, fabric="roce", bandwidth=3200, on_demand=False, hyperdisk=True),
    _gcp("a3-ultragpu-8g", 224, 2952, "H200", 8, 141, 12000, fabric="roce", bandwidth=3200, on_demand=False, hyperdisk=True),
    _gcp("a3-megagpu-8g", 208, 1872, "H100", 8, 80, 6000, fabric="tcpxo", bandwidth=1600),
    _gcp("a3-highgpu-8g", 208, 1872, "H100", 8, 80, 6000, fabric="tcpx", bandwidth=800),
    _gcp("a3-highgpu-4g", 104, 936, "H100", 4, 80, 3000, on_demand=False),
    _gcp("a3-highgpu-2g", 52, 468, "H100", 2, 80, 1500, on_demand=False),
    _gcp("a3-highgpu-1g", 26, 234, "H100", 1, 80, 750, on_demand=False),
    _gcp("a2-ultragpu-8g", 96, 1360, "A100", 8, 80, 3000),
    _gcp("a2-ultragpu-4g", 48, 680, "A100", 4, 80, 1500),
    _gcp("a2-ultragpu-2g", 24, 340, "A100", 2, 80, 750),
    _gcp("a2-ultragpu-1g", 12, 170, "A100", 1, 80, 375),
    _gcp("a2-megagpu-16g", 96, 1360, "A100", 16, 40),
    _gcp("a2-highgpu-8g", 96, 680, "A100", 8, 40),
    _gcp("a2-highgpu-4g", 48, 340, "A100", 4, 40),
    _gcp("a2-highgpu-2g", 24, 170, "A100", 2, 40),
    _gcp("a2-highgpu-1g", 12, 85, "A100", 1, 40),
    _gcp("g2-standard-96", 96, 384, "L4", 8, 24),
    _gcp("g2-standard-48", 48, 192, "L4", 4, 24),
    _gcp("g2-standard-32", 32, 128, "L4", 1, 24),
    _gcp("g2-standard-24", 24, 96, "L4", 2, 24),
    _gcp("g2-standard-16", 16, 64, "L4", 1, 24),
    _gcp("g2-standard-12", 12, 48, "L4", 1, 24),
    _gcp("g2-standard-8", 8, 32, "L4", 1, 24),
    _gcp("g2-standard-4", 4, 16, "L4", 1, 24),
    _gcp("n2-standard-16", 16, 64),
    _gcp("n2-standard-8", 8, 32),
    _gcp("n2-standard-4", 4, 16),
)
# fmt: on

MACHINES: dict[tuple[Cloud, str], Machine] = {(one.cloud, one.name): one for one in _TABLE}
