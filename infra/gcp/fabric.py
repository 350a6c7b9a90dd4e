"""The networks of the GPU fabric: one per interface for GPUDirect-TCPX and TCPXO, one with the RoCE profile for RDMA."""

from __future__ import annotations

from dataclasses import dataclass

import pulumi
from pulumi_gcp import compute

from infra.gcp.addresses import Addresses
from infra.gcp.names import network_profile


@dataclass(frozen=True)
class FabricArgs:
    project: str
    region: str
    zone: str | None  # of the RoCE network; others span the region
    addresses: Addresses
    mtu: int  # bytes


class Fabric(pulumi.ComponentResource):
    """`vpcs` and `roce` are names of networks, the subnets are ids in the order of the interfaces."""

    vpcs: list[pulumi.Output[str]]
    vpc_subnets: list[pulumi.Output[str]]
    roce: pulumi.Output[str] | None
    rdma_subnets: list[pulumi.Output[str]]

    def __init__(self, name: str, args: FabricArgs, opts: pulumi.ResourceOptions | None = None):
        super().__init__("flotilla:gcp:Fabric", name, None, opts)
        self._child = pulumi.ResourceOptions(parent=self)
        self.vpcs, self.vpc_subnets, self.roce, self.rdma_subnets = [], [], None, []
        for index, cidr in enumerate(args.addresses.vpcs):
            self._vpc(f"{name}-gpu{index}", args, str(cidr))
        if args.addresses.rdma:
            self._roce(f"{name}-roce", args)
        self.register_outputs({"vpcs": self.vpcs, "roce": self.roce})

    def _vpc(self, name: str, args: FabricArgs, cidr: str) -> None:
        vpc = compute.Network(name, auto_create_subnetworks=False, mtu=args.mtu, opts=self._child)
        subnet = compute.Subnetwork(name, network=vpc.id, region=args.region, ip_cidr_range=cidr, opts=self._child)
        compute.Firewall(
            name,
            network=vpc.name,
            description="Interfaces of the fabric talk to one another.",
            direction="INGRESS",
            source_ranges=[cidr],
            allows=[{"protocol": "all"}],
            opts=self._child,
        )
        self.vpcs.append(vpc.name)
        self.vpc_subnets.append(subnet.id)

    def _roce(self, name: str, args: FabricArgs) -> None:
        assert args.zone  # infra/gcp/checks.py
        profile = f"projects/{args.project}/global/networkProfiles/{network_profile(args.zone)}"
        # The profile brings its own rules; a network that has it takes no others.
        vpc = compute.Network(name, auto_create_subnetworks=False, mtu=args.mtu, network_profile=profile, opts=self._child)
        for index, cidr in enumerate(args.addresses.rdma):
            subnet = compute.Subnetwork(f"{name}{index}", network=vpc.id, region=args.region, ip_cidr_range=str(cidr), opts=self._child)
            self.rdma_subnets.append(subnet.id)
        self.roce = vpc.name
