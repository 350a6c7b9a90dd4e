"""The VPC: a private subnet in each zone for nodes, a public one for NAT and bastion, S3 without NAT; and the nodes' security group.

dstack makes a group of its own where it finds none, which no `pulumi destroy` removes, and it adds the rules that it misses. So
the group and the rules are declared here as dstack would make them, and it takes them as they are.
EFA needs all traffic to the group itself in both directions: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-start.html
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv4Network
from typing import Literal

import pulumi
from pulumi_aws import cloudwatch, ec2, iam, vpc

from infra.aws import policies
from stacks.load import StackError
from stacks.places.aws import Blocks, cut
from stacks.schema import Stack

ANYWHERE = "0.0.0.0/0"
LOG_DAYS = 30  # for which logs are kept


@dataclass(frozen=True)
class NetworkArgs:
    """What a new network is made of."""

    cidr: IPv4Network
    zones: list[str]
    nat: Literal["one", "per-zone"]
    flow_logs: bool
    region: str
    stack: str
    boundary: pulumi.Input[str] | None = None  # of the flow logs' role


@dataclass(frozen=True)
class Subnets:
    """Where nodes stand: a network, new or existing, with its subnets by zone."""

    vpc_id: pulumi.Input[str]
    cidr: str  # of all addresses in it
    private: dict[str, pulumi.Input[str]]
    public: dict[str, pulumi.Input[str]]
    made: tuple[pulumi.Resource, ...] = ()  # what machines wait for: without its routes they start without internet
    shared: tuple[str, ...] = ()  # ARNs of those that are another account's

    @property
    def first(self) -> pulumi.Input[str]:
        """The private subnet of what stands in one zone: nodes side by side, and the file system beside them."""
        return self.private[next(iter(self.private))]


def existing(stack: Stack, zones: list[str], account: policies.Account, invoke_opts: pulumi.InvokeOptions) -> Subnets:
    """The network that the stack names, with the first of its subnets in each zone; AWS says so where one is of another network.

    Raises StackError where one is in a zone that does not offer the machines, as for flotilla:network.zones.
    """
    wanted = stack.network
    assert wanted.vpc  # asked by the caller
    look = partial(ec2.get_subnet, vpc_id=wanted.vpc, region=stack.region, opts=invoke_opts)
    subnets = {subnet: look(id=subnet) for subnet in wanted.subnets}
    found = {subnet: it.availability_zone for subnet, it in subnets.items()}
    if elsewhere := {subnet: zone for subnet, zone in found.items() if zone not in zones}:
        where = ", ".join(f"{subnet} is in {zone}" for subnet, zone in elsewhere.items())
        raise StackError(
            f"stacks/Pulumi.{stack.name}.yaml: flotilla:network.subnets: {where}, but the machines are offered in {', '.join(zones)}"
        )
    private: dict[str, pulumi.Input[str]] = {}
    for subnet, zone in found.items():
        private.setdefault(zone, subnet)
    vpc = ec2.get_vpc(id=wanted.vpc, opts=invoke_opts)
    shared = tuple(it.arn for it in (vpc, *subnets.values()) if it.owner_id != account.id)
    return Subnets(wanted.vpc, vpc.cidr_block, private, {}, shared=shared)


class Network(pulumi.ComponentResource):
    """A VPC whose nodes reach the internet and cannot be reached from it."""

    def __init__(self, name: str, args: NetworkArgs, opts: pulumi.ResourceOptions | None = None):
        super().__init__("flotilla:aws:Network", name, None, opts)
        self.child = pulumi.ResourceOptions(parent=self)
        self.vpc = ec2.Vpc(
            name,
            cidr_block=str(args.cidr),
            enable_dns_hostnames=True,  # FSx and the endpoints are found by name
            enable_dns_support=True,
            tags={"Name": name},
            opts=self.child,
        )
        # Nobody's: what forgets to name a group can neither send nor receive.
        ec2.DefaultSecurityGroup(f"{name}-default", vpc_id=self.vpc.id, tags={"Name": f"{name}-unused"}, opts=self.child)
        blocks = cut(args.cidr, args.zones)
        public, way_out = self._public(name, blocks)
        private, private_tables = self._private(name, blocks, self._gateways(name, public, args.nat, way_out))
        ec2.VpcEndpoint(
            f"{name}-s3",
            vpc_id=self.vpc.id,
            service_name=f"com.amazonaws.{args.region}.s3",
            vpc_endpoint_type="Gateway",  # free of charge, and checkpoints pass no NAT
            route_table_ids=[table.id for table in private_tables],
            tags={"Name": f"{name}-s3"},
            opts=self.child,
        )
        if args.flow_logs:
            self._flow_logs(name, args)
        self.subnets = Subnets(self.vpc.id, str(args.cidr), private, public, (self,))
        self.register_outputs({"vpc": self.vpc.id, "private": private, "public": public})

    def _public(self, name: str, blocks: dict[str, Blocks]) -> tuple[dict[str, pulumi.Input[str]], ec2.Route]:
        gateway = ec2.InternetGateway(name, vpc_id=self.vpc.id, tags={"Name": name}, opts=self.child)
        table = ec2.RouteTable(f"{name}-public", vpc_id=self.vpc.id, tags={"Name": f"{name}-public"}, opts=self.child)
        out = ec2.Route(f"{name}-public", route_table_id=table.id, destination_cidr_block=ANYWHERE, gateway_id=gateway.id, opts=self.child)
        return {zone: self._subnet(f"{name}-public-{zone}", zone, block.public, table) for zone, block in blocks.items()}, out

    def _gateways(self, name: str, public: dict[str, pulumi.Input[str]], nat: str, way_out: ec2.Route) -> dict[str, ec2.NatGateway]:
        """NAT gateways by zone; with one, every zone uses the first's."""
        made = {}
        for zone in [*public] if nat == "per-zone" else [*public][:1]:
            address = ec2.Eip(f"{name}-nat-{zone}", domain="vpc", tags={"Name": f"{name}-nat-{zone}"}, opts=self.child)
            # Made after the way out of its subnet, and destroyed before.
            after = pulumi.ResourceOptions(parent=self, depends_on=[way_out])
            made[zone] = ec2.NatGateway(
                f"{name}-{zone}", subnet_id=public[zone], allocation_id=address.id, tags={"Name": f"{name}-{zone}"}, opts=after
            )
        return made

    def _private(
        self, name: str, blocks: dict[str, Blocks], gateways: dict[str, ec2.NatGateway]
    ) -> tuple[dict[str, pulumi.Input[str]], list[ec2.RouteTable]]:
        """A route table for each NAT gateway. dstack takes subnets whose default route leads to one for private."""
        tables = {}
        for zone, gateway in gateways.items():
            label = f"{name}-private-{zone}" if len(gateways) > 1 else f"{name}-private"
            tables[zone] = ec2.RouteTable(label, vpc_id=self.vpc.id, tags={"Name": label}, opts=self.child)
            ec2.Route(label, route_table_id=tables[zone].id, destination_cidr_block=ANYWHERE, nat_gateway_id=gateway.id, opts=self.child)
        first = next(iter(tables.values()))
        private: dict[str, pulumi.Input[str]] = {
            zone: self._subnet(f"{name}-private-{zone}", zone, block.private, tables.get(zone, first)) for zone, block in blocks.items()
        }
        return private, [*tables.values()]

    def _subnet(self, label: str, zone: str, cidr: IPv4Network, table: ec2.RouteTable) -> pulumi.Output[str]:
        """A subnet of the table. None gives machines a public address by itself."""
        subnet = ec2.Subnet(
            label,
            vpc_id=self.vpc.id,
            availability_zone=zone,
            cidr_block=str(cidr),
            map_public_ip_on_launch=False,
            tags={"Name": label},
            opts=self.child,
        )
        ec2.RouteTableAssociation(label, subnet_id=subnet.id, route_table_id=table.id, opts=self.child)
        return subnet.id

    def _flow_logs(self, name: str, args: NetworkArgs) -> None:
        group = cloudwatch.LogGroup(f"{name}-flow", retention_in_days=LOG_DAYS, opts=self.child)
        role = iam.Role(
            f"{name}-flow",
            path=policies.path(args.stack),
            assume_role_policy=policies.trust("vpc-flow-logs.amazonaws.com"),
            permissions_boundary=args.boundary,
            opts=self.child,
        )
        may_write = group.arn.apply(lambda arn: json.dumps(policies.flow_logs(arn)))
        written = iam.RolePolicy(f"{name}-flow", role=role.id, policy=may_write, opts=self.child)
        ec2.FlowLog(
            name,
            vpc_id=self.vpc.id,
            traffic_type="ALL",
            log_destination=group.arn,
            iam_role_arn=role.arn,
            tags={"Name": name},
            opts=pulumi.ResourceOptions(parent=self, depends_on=[written]),
        )


@dataclass(frozen=True)
class NodeSecurityArgs:
    """`ssh` is the network that may log in. dstack finds a group by its name, so that of its own is fixed."""

    vpc_id: pulumi.Input[str]
    group_name: str | None
    ssh: pulumi.Input[str]


class NodeSecurity(pulumi.ComponentResource):
    """A group whose members reach one another and the internet, and are reached by SSH alone."""

    def __init__(self, name: str, args: NodeSecurityArgs, opts: pulumi.ResourceOptions | None = None):
        super().__init__("flotilla:aws:NodeSecurity", name, None, opts)
        child = pulumi.ResourceOptions(parent=self)
        group = ec2.SecurityGroup(
            f"{name}-nodes",  # never sg: AWS refuses names that begin with sg-
            name=args.group_name,
            description="Nodes of a cluster: all traffic among themselves, SSH from outside.",
            vpc_id=args.vpc_id,
            tags={"Name": f"{name}-nodes"},
            # Interfaces that a launch left behind go before the group does.
            opts=pulumi.ResourceOptions(parent=self, custom_timeouts=pulumi.CustomTimeouts(delete="15m")),
        )
        vpc.SecurityGroupIngressRule(
            f"{name}-ssh",
            security_group_id=group.id,
            ip_protocol="tcp",
            from_port=22,
            to_port=22,
            cidr_ipv4=args.ssh,
            description="as dstack wants it; private subnets let nothing in from outside" if args.ssh == ANYWHERE else None,
            opts=child,
        )
        vpc.SecurityGroupIngressRule(
            f"{name}-self-in", security_group_id=group.id, ip_protocol="-1", referenced_security_group_id=group.id, opts=child
        )
        vpc.SecurityGroupEgressRule(
            f"{name}-self-out", security_group_id=group.id, ip_protocol="-1", referenced_security_group_id=group.id, opts=child
        )
        vpc.SecurityGroupEgressRule(f"{name}-out", security_group_id=group.id, ip_protocol="-1", cidr_ipv4=ANYWHERE, opts=child)
        self.group_id = group.id
        self.register_outputs({"group": group.id})
