"""The private network of the nodes: a subnet with NAT, where nodes talk to one another and only Google's IAP comes in by SSH.

And the networks of the GPU fabric: one per interface for GPUDirect-TCPX and TCPXO, one with the RoCE profile for RDMA.
"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Network

import pulumi
from pulumi_gcp import compute

from infra.gcp.names import IAP, NODE_TAG, network_profile, ssh_rule
from stacks.places import given
from stacks.places.gcp import cut
from stacks.places.machine_types import Networks
from stacks.settings import cloud


@dataclass(frozen=True)
class NetworkArgs:
    project: str
    region: str
    settings: cloud.Network
    fabric: Networks  # what shares the plan of addresses with a new network, and its frame size
    given: given.Network | None = None


class Network(pulumi.ComponentResource):
    """A new network, or the firewall rules that an existing one needs for the nodes; those of a Shared VPC are its host project's."""

    vpc: pulumi.Output[str]  # name
    subnet: pulumi.Output[str]  # name
    subnet_id: pulumi.Output[str]
    cidr: pulumi.Output[str]
    ready: list[pulumi.Resource]  # what machines wait for: the way out, and the rules that let them talk

    def __init__(self, name: str, args: NetworkArgs, opts: pulumi.ResourceOptions | None = None):
        super().__init__("flotilla:gcp:Network", name, None, opts)
        self._child = pulumi.ResourceOptions(parent=self)
        self.ready = []
        if args.given:
            self._look_up(args, args.given)
        else:
            self._create(name, args)
        if not (args.given and args.given.shared):
            self._allow(name, args)
        self.register_outputs({"vpc": self.vpc, "subnet": self.subnet, "cidr": self.cidr})

    def _look_up(self, args: NetworkArgs, given: given.Network) -> None:
        found = compute.get_subnetwork_output(
            name=given.subnet, project=given.project, region=args.region, opts=pulumi.InvokeOutputOptions(parent=self)
        )
        self.vpc, self.subnet = pulumi.Output.from_input(given.vpc), pulumi.Output.from_input(given.subnet)
        self.subnet_id, self.cidr = found.id, found.ip_cidr_range

    def _create(self, name: str, args: NetworkArgs) -> None:
        main = str(cut(args.settings.cidr, args.fabric).main)
        vpc = compute.Network(name, auto_create_subnetworks=False, mtu=args.fabric.mtu, routing_mode="REGIONAL", opts=self._child)
        subnet = compute.Subnetwork(
            name,
            network=vpc.id,
            region=args.region,
            ip_cidr_range=main,
            private_ip_google_access=True,  # GCS and the APIs without NAT
            log_config={"aggregation_interval": "INTERVAL_10_MIN", "flow_sampling": 0.5} if args.settings.flow_logs else None,
            opts=self._child,
        )
        router = compute.Router(name, network=vpc.id, region=args.region, opts=self._child)
        # Dynamic ports: a node that pulls images and models opens more connections than the 64 that are each machine's by default.
        nat = compute.RouterNat(
            name,
            router=router.name,
            region=args.region,
            nat_ip_allocate_option="AUTO_ONLY",
            source_subnetwork_ip_ranges_to_nat="LIST_OF_SUBNETWORKS",
            subnetworks=[{"name": subnet.id, "source_ip_ranges_to_nats": ["ALL_IP_RANGES"]}],
            enable_dynamic_port_allocation=True,
            min_ports_per_vm=64,
            max_ports_per_vm=4096,
            enable_endpoint_independent_mapping=False,
            log_config={"enable": True, "filter": "ERRORS_ONLY"},
            opts=self._child,
        )
        self.ready.append(nat)
        self.vpc, self.subnet, self.subnet_id = vpc.name, subnet.name, subnet.id
        self.cidr = pulumi.Output.from_input(main)

    def _allow(self, name: str, args: NetworkArgs) -> None:
        internal = compute.Firewall(
            f"{name}-internal",
            network=self.vpc,
            description="Nodes talk to one another on all ports: Ray, NCCL, rendezvous.",
            direction="INGRESS",
            source_ranges=[self.cidr],
            target_tags=[NODE_TAG],
            allows=[{"protocol": "all"}],
            opts=self._child,
        )
        ssh = compute.Firewall(
            f"{name}-ssh",
            # dstack would insert a rule of this name that lets everybody in, and never remove it; it accepts this one.
            name=self.vpc.apply(lambda vpc: ssh_rule(args.project, vpc)),
            network=self.vpc,
            description="SSH through Identity-Aware Proxy alone.",
            direction="INGRESS",
            source_ranges=[IAP],
            target_tags=[NODE_TAG],
            allows=[{"protocol": "tcp", "ports": ["22"]}],
            opts=self._child,
        )
        self.ready += [internal, ssh]


@dataclass(frozen=True)
class FabricArgs:
    project: str
    region: str
    settings: cloud.Network
    fabric: Networks


class Fabric(pulumi.ComponentResource):
    """`vpcs` and `roce` are names of networks, the subnets are ids in the order of the interfaces."""

    vpcs: list[pulumi.Output[str]]
    vpc_subnets: list[pulumi.Output[str]]
    roce: pulumi.Output[str] | None
    rdma_subnets: list[pulumi.Output[str]]

    def __init__(self, name: str, args: FabricArgs, opts: pulumi.ResourceOptions | None = None):
        super().__init__("flotilla:gcp:Fabric", name, None, opts)
        self._child = pulumi.ResourceOptions(parent=self)
        blocks = cut(args.settings.cidr, args.fabric)
        self.vpcs, self.vpc_subnets, self.roce, self.rdma_subnets = [], [], None, []
        for index, cidr in enumerate(blocks.vpcs):
            self._vpc(f"{name}-gpu{index}", args, str(cidr))
        if blocks.rdma:
            self._roce(f"{name}-roce", args, blocks.rdma)
        self.register_outputs({"vpcs": self.vpcs, "roce": self.roce})

    def _vpc(self, name: str, args: FabricArgs, cidr: str) -> None:
        vpc = compute.Network(name, auto_create_subnetworks=False, mtu=args.fabric.mtu, opts=self._child)
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

    def _roce(self, name: str, args: FabricArgs, ranges: tuple[IPv4Network, ...]) -> None:
        [zone] = args.settings.zones  # one, by stacks/places/gcp.py: the network lives in it, while others span the region
        profile = f"projects/{args.project}/global/networkProfiles/{network_profile(zone)}"
        # The profile brings its own rules; a network that has it takes no others.
        vpc = compute.Network(name, auto_create_subnetworks=False, mtu=args.fabric.mtu, network_profile=profile, opts=self._child)
        for index, cidr in enumerate(ranges):
            subnet = compute.Subnetwork(f"{name}{index}", network=vpc.id, region=args.region, ip_cidr_range=str(cidr), opts=self._child)
            self.rdma_subnets.append(subnet.id)
        self.roce = vpc.name
