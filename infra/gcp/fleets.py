"""The fleets that Pulumi launches, and the way to them."""

from __future__ import annotations

from dataclasses import dataclass, field

import pulumi

from infra.gcp import startup
from infra.gcp.bastion import Bastion, BastionArgs
from infra.gcp.checks import fleet_fabric
from infra.gcp.fabric import Fabric
from infra.gcp.nodes import Nodes, NodesArgs
from stacks.cloud_settings import Access
from stacks.machines import Machine
from stacks.schema import Fleet, Stack


@dataclass(frozen=True)
class LaunchArgs:
    """What the machines of all fleets share."""

    name: str
    stack: Stack
    machines: dict[str, Machine]
    region: str
    vpc: pulumi.Output[str]  # name
    subnet: pulumi.Output[str]  # id
    fabric: Fabric | None
    account: pulumi.Output[str]
    mount: pulumi.Output[list[str]]
    disk: pulumi.Output[str] | None
    labels: dict[str, str]
    unlabelled: pulumi.ProviderResource
    after: list[pulumi.Resource]


@dataclass(frozen=True)
class Launched:
    """Private addresses, and the name of one machine, by fleet; address of the bastion."""

    addresses: dict[str, pulumi.Output[list[str]]] = field(default_factory=dict)
    first: dict[str, pulumi.Output[str]] = field(default_factory=dict)
    bastion: pulumi.Output[str] | None = None


def launch(args: LaunchArgs, opts: pulumi.ResourceOptions) -> Launched:
    """Nothing where dstack launches every fleet."""
    fleets = [fleet for fleet in args.stack.fleets if fleet.provision == "pulumi"]
    access = args.stack.access
    if not fleets or access is None:
        return Launched()
    made = {fleet.name: _nodes(args, access, fleet, opts) for fleet in fleets}
    bastion = _bastion(args, access, opts).address if access.via == "bastion" else None
    return Launched({name: one.addresses for name, one in made.items()}, {name: one.first for name, one in made.items()}, bastion)


def _nodes(args: LaunchArgs, access: Access, fleet: Fleet, opts: pulumi.ResourceOptions) -> Nodes:
    machine = args.machines[fleet.name]
    wired = fleet_fabric(fleet, machine)
    start = startup.fabric_lines(wired, own_image=fleet.image is not None)
    shared = NodesArgs(
        fleet=fleet,
        machine=machine,
        region=args.region,
        zone=args.stack.network.zones[0],
        subnet=args.subnet,
        fabric=args.fabric if wired != "none" else None,
        account=args.account,
        startup=args.mount.apply(lambda mount: startup.script(access, mount, start)),
        disk=args.disk,
        labels=args.labels,
        after=args.after,
    )
    return Nodes(f"{args.name}-{fleet.name}", shared, args.unlabelled, opts=opts)


def _bastion(args: LaunchArgs, access: Access, opts: pulumi.ResourceOptions) -> Bastion:
    return Bastion(args.name, BastionArgs(args.region, args.stack.network.zones[0], access, args.vpc, args.subnet), opts=opts)
