"""The fleets that Pulumi launches, and the way to them."""

from __future__ import annotations

from dataclasses import dataclass, field

import pulumi
from pulumi_aws import ec2, ssm

from infra.aws import bastion, nodes
from infra.aws.network import Place
from infra.machines import Machine
from stacks.schema import Fleet, Stack


@dataclass(frozen=True)
class LaunchArgs:
    """What the instances of all fleets share."""

    name: str
    stack: Stack
    machines: dict[str, Machine]
    place: Place
    group_id: pulumi.Input[str]
    profile_arn: pulumi.Input[str]
    mount: pulumi.Output[list[str]]
    tags: dict[str, str]
    boundary: pulumi.Input[str] | None


@dataclass(frozen=True)
class Launched:
    """Private addresses and image by fleet; address and id of the bastion."""

    addresses: dict[str, list[pulumi.Output[str]]] = field(default_factory=dict)
    images: dict[str, str] = field(default_factory=dict)
    bastion: pulumi.Output[str] | None = None
    bastion_id: pulumi.Output[str] | None = None


def launch(args: LaunchArgs, opts: pulumi.ResourceOptions, ask: pulumi.InvokeOptions) -> Launched:
    """Nothing where dstack launches every fleet."""
    fleets = [fleet for fleet in args.stack.fleets if fleet.provision == "pulumi"]
    if not fleets:
        return Launched()
    assert args.stack.access  # stacks/rules.py
    key = ec2.KeyPair(args.name, public_key=args.stack.access.public_key, tags={"Name": args.name}, opts=opts)
    images = {fleet.name: fleet.image or _newest(_image(args.machines[fleet.name]), ask) for fleet in fleets}
    made = {fleet.name: _nodes(args, fleet, images[fleet.name], key.key_name, opts) for fleet in fleets}
    jump = None if args.stack.access.via == "direct" else _bastion(args, key.key_name, opts, ask)
    return Launched(
        {name: one.addresses for name, one in made.items()}, images, jump.address if jump else None, jump.instance_id if jump else None
    )


def _nodes(args: LaunchArgs, fleet: Fleet, image: str, key: pulumi.Input[str], opts: pulumi.ResourceOptions) -> nodes.Nodes:
    assert args.stack.access
    shared = nodes.NodesArgs(
        fleet=fleet,
        machine=args.machines[fleet.name],
        image=image,
        subnet_id=args.place.first,
        group_id=args.group_id,
        profile_arn=args.profile_arn,
        key_name=key,
        user=args.stack.access.user,
        mount=args.mount,
        tags=args.tags,
    )
    return nodes.Nodes(f"{args.name}-{fleet.name}", shared, opts=opts)


def _bastion(args: LaunchArgs, key: pulumi.Input[str], opts: pulumi.ResourceOptions, ask: pulumi.InvokeOptions) -> bastion.Bastion:
    access = args.stack.access
    assert access
    subnet = args.place.public[min(args.place.public)] if access.via == "bastion" else args.place.first
    image = _newest(bastion.IMAGE, ask)
    shared = bastion.BastionArgs(args.place.vpc_id, subnet, access, key, image, args.stack.name, args.boundary)
    return bastion.Bastion(args.name, shared, opts=opts)


def _image(machine: Machine) -> str:
    return nodes.GPU_IMAGE if machine.gpu else nodes.CPU_IMAGE


def _newest(parameter: str, ask: pulumi.InvokeOptions) -> str:
    return ssm.get_parameter(name=parameter, opts=ask).value
