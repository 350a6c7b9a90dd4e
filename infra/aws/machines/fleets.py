"""The fleets that Pulumi launches, and the way to them."""

from __future__ import annotations

from dataclasses import dataclass

import pulumi
from pulumi_aws import ec2, ssm

from infra.aws.machines import bastion, startup
from infra.aws.machines.bastion import BastionArgs
from infra.aws.machines.nodes import Nodes, NodesArgs
from infra.aws.network import Subnets
from stacks.places.machine_types import Machine
from stacks.schema import Fleet, Stack


@dataclass(frozen=True)
class FleetsArgs:
    """What the instances of all fleets share."""

    stack: Stack
    machines: dict[str, Machine]
    subnets: Subnets
    group_id: pulumi.Input[str]
    profile_arn: pulumi.Input[str]
    mount: pulumi.Output[list[str]]
    tags: dict[str, str]
    boundary: pulumi.Input[str] | None
    after: list[pulumi.Resource]  # what a machine needs when it starts


class Fleets(pulumi.ComponentResource):
    """Private addresses and image by fleet; address and id of the bastion, where there is one."""

    def __init__(self, name: str, args: FleetsArgs, invoke_opts: pulumi.InvokeOptions, opts: pulumi.ResourceOptions | None = None):
        super().__init__("flotilla:aws:Fleets", name, None, opts)
        child = pulumi.ResourceOptions(parent=self)
        access = args.stack.access
        assert access  # stacks/rules.py
        key = ec2.KeyPair(name, public_key=access.public_key, tags={"Name": name}, opts=child).key_name
        fleets = [fleet for fleet in args.stack.fleets if fleet.provision == "pulumi"]
        self.images = {fleet.name: fleet.image or _newest(_parameter(args, fleet), invoke_opts) for fleet in fleets}
        made = {fleet.name: self._nodes(name, args, fleet, key) for fleet in fleets}
        self.addresses = {fleet: nodes.addresses for fleet, nodes in made.items()}
        self.bastion: pulumi.Output[str] | None = None
        self.bastion_id: pulumi.Output[str] | None = None
        if access.via != "direct":
            subnet = args.subnets.public[min(args.subnets.public)] if access.via == "bastion" else args.subnets.first
            hop = BastionArgs(
                args.subnets.vpc_id, subnet, access, key, _newest(bastion.IMAGE, invoke_opts), args.stack.name, args.boundary, args.after
            )
            jump = bastion.Bastion(name, hop, opts=child)
            self.bastion, self.bastion_id = jump.address, jump.instance_id
        self.register_outputs({"addresses": self.addresses, "bastion": self.bastion})

    def _nodes(self, name: str, args: FleetsArgs, fleet: Fleet, key: pulumi.Input[str]) -> Nodes:
        access, folder = args.stack.access, str(args.stack.checkpoints.path)
        assert access  # stacks/rules.py
        shared = NodesArgs(
            fleet=fleet,
            machine=args.machines[fleet.name],
            image=self.images[fleet.name],
            subnet_id=args.subnets.first,
            group_id=args.group_id,
            profile_arn=args.profile_arn,
            key_name=key,
            startup=args.mount.apply(
                lambda mount: startup.script(access.user, mount, folder, args.machines[fleet.name], _monitoring(args.stack))
            ),
            prepared_for=[access.user, args.stack.checkpoints.kind, folder, *args.stack.checkpoints.given()],
            tags=args.tags,
            after=args.after,
        )
        return Nodes(f"{name}-{fleet.name}", shared, opts=pulumi.ResourceOptions(parent=self))


def _monitoring(stack: Stack) -> list[str]:
    assert stack.region  # stacks/rules.py
    return startup.monitoring(stack.name, stack.region, str(stack.checkpoints.path)) if stack.monitoring.cloud else []


def _parameter(args: FleetsArgs, fleet: Fleet) -> str:
    return startup.image_parameter(args.machines[fleet.name])


def _newest(parameter: str, invoke_opts: pulumi.InvokeOptions) -> str:
    return ssm.get_parameter(name=parameter, opts=invoke_opts).value
