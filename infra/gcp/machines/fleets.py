"""The fleets that Pulumi launches, and the way to them."""

from __future__ import annotations

from dataclasses import dataclass

import pulumi

from infra.gcp.machines import capacity, startup
from infra.gcp.machines.bastion import Bastion, BastionArgs
from infra.gcp.machines.nodes import Nodes, NodesArgs
from infra.gcp.network import Fabric
from stacks.places.machine_types import Machine
from stacks.schema import Fleet, Stack
from stacks.settings.cloud import Access


@dataclass(frozen=True)
class FleetsArgs:
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


class Fleets:
    """Private addresses, and the name of one machine, by fleet; address of the bastion. Nothing where dstack launches every fleet.

    Not a component: the machines' own components stand below the stack, and to move them would replace the machines.
    """

    def __init__(self, args: FleetsArgs, opts: pulumi.ResourceOptions):
        fleets, access = [fleet for fleet in args.stack.fleets if fleet.provision == "pulumi"], args.stack.access
        self.addresses: dict[str, pulumi.Output[list[str]]] = {}
        self.first: dict[str, pulumi.Output[str]] = {}
        self.bastion: pulumi.Output[str] | None = None
        if not fleets or access is None:
            return
        for fleet in fleets:
            nodes = _nodes(args, access, fleet, opts)
            self.addresses[fleet.name], self.first[fleet.name] = nodes.addresses, nodes.first
        if access.via == "bastion":
            hop = BastionArgs(args.region, args.stack.network.zones[0], access, args.vpc, args.subnet)
            self.bastion = Bastion(args.name, hop, opts=opts).address


def _nodes(args: FleetsArgs, access: Access, fleet: Fleet, opts: pulumi.ResourceOptions) -> Nodes:
    machine = args.machines[fleet.name]
    wired = machine.wired(fleet.nodes)
    start, folder = startup.fabric_lines(wired, own_image=fleet.image is not None), str(args.stack.checkpoints.path)
    monitor = startup.MONITORING if args.stack.monitoring.cloud else ()
    shared = NodesArgs(
        fleet=fleet,
        machine=machine,
        region=args.region,
        zone=args.stack.network.zones[0],
        subnet=args.subnet,
        fabric=args.fabric if wired != "none" else None,
        account=args.account,
        startup=args.mount.apply(lambda mount: startup.script(access, mount, folder, start, machine, monitor)),
        prepared_for=[access.user, access.public_key, args.stack.checkpoints.kind, folder, *args.stack.checkpoints.given()],
        disk=args.disk,
        reserved_policy=capacity.reserved_policy(args.stack, fleet),
        labels=args.labels,
        after=args.after,
    )
    return Nodes(f"{args.name}-{fleet.name}", shared, args.unlabelled, opts=opts)
