"""The private network of the nodes: a subnet with NAT, where nodes talk to one another and only Google's IAP comes in by SSH."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Network

import pulumi
from pulumi_gcp import compute

from infra.gcp.names import NODE_TAG, ssh_rule
from stacks import cloud_settings

IAP = "35.235.240.0/20"  # https://docs.cloud.google.com/iap/docs/using-tcp-forwarding


@dataclass(frozen=True)
class NetworkArgs:
    project: str
    region: str
    settings: cloud_settings.Network
    subnet: IPv4Network  # range of the nodes' subnet, where the network is new
    mtu: int  # bytes


class Network(pulumi.ComponentResource):
    """A new network, or the firewall rules that an existing one needs for the nodes."""

    vpc: pulumi.Output[str]  # name
    subnet: pulumi.Output[str]  # name
    subnet_id: pulumi.Output[str]
    cidr: pulumi.Output[str]
    ready: list[pulumi.Resource]  # what machines wait for: the way out, and the rules that let them talk

    def __init__(self, name: str, args: NetworkArgs, opts: pulumi.ResourceOptions | None = None):
        super().__init__("flotilla:gcp:Network", name, None, opts)
        self._child = pulumi.ResourceOptions(parent=self)
        self.ready = []
        if args.settings.vpc:
            self._look_up(args)
        else:
            self._create(name, args)
        self._allow(name, args)
        self.register_outputs({"vpc": self.vpc, "subnet": self.subnet, "cidr": self.cidr})

    def _look_up(self, args: NetworkArgs) -> None:
        found = compute.get_subnetwork_output(
            name=args.settings.subnets[0], project=args.project, region=args.region, opts=pulumi.InvokeOutputOptions(parent=self)
        )
        self.vpc = pulumi.Output.from_input(args.settings.vpc or "")
        self.subnet, self.subnet_id, self.cidr = pulumi.Output.from_input(args.settings.subnets[0]), found.id, found.ip_cidr_range

    def _create(self, name: str, args: NetworkArgs) -> None:
        vpc = compute.Network(name, auto_create_subnetworks=False, mtu=args.mtu, routing_mode="REGIONAL", opts=self._child)
        subnet = compute.Subnetwork(
            name,
            network=vpc.id,
            region=args.region,
            ip_cidr_range=str(args.subnet),
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
        self.cidr = pulumi.Output.from_input(str(args.subnet))

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
