"""Instances that Pulumi launches: all cards of the fabric, encrypted disks, IMDSv2, ready for dstack's SSH fleet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pulumi
from pulumi_aws import ec2

from infra.aws.machines.capacity import Placement, placed_together, purchase
from stacks.places.machine_types import Machine
from stacks.schema import Fleet
from stacks.settings.fields import gigabytes

DISK = 500  # GB of the root disk where the stack says nothing


@dataclass(frozen=True)
class NodesArgs:
    """Where the instances of a fleet stand and what they are."""

    fleet: Fleet
    machine: Machine
    image: str
    subnet_id: pulumi.Input[str]
    group_id: pulumi.Input[str]
    profile_arn: pulumi.Input[str]
    key_name: pulumi.Input[str]
    startup: pulumi.Output[str]  # user data
    prepared_for: list[Any]  # settings that user data prepares a node for; another one wants a new node
    after: list[pulumi.Resource]  # what machines need when they start; the template waits for it, and they for that
    tags: dict[str, str]  # of the disks, which a launch makes unseen by the provider


class Nodes(pulumi.ComponentResource):
    """The instances of one fleet, all from one launch template; `addresses` are their private ones, in order.

    What a running instance cannot take on makes another template, and that replaces every instance, the old one first: a reservation
    or a quota has no room for both. Other user data alone, such as an edit of ready.sh, is a version that no running node is taken from.
    """

    def __init__(self, name: str, args: NodesArgs, opts: pulumi.ResourceOptions | None = None):
        super().__init__("flotilla:aws:Nodes", name, None, opts)
        child = pulumi.ResourceOptions(parent=self)
        placement = Placement(name, opts=child).group if placed_together(args.fleet, args.machine) else None
        group = placement.name if placement else args.fleet.capacity.policy
        launched: dict[str, Any] = {
            "instance_type": args.machine.name,
            "key_name": args.key_name,
            "iam_instance_profile": {"arn": args.profile_arn},
            "network_interfaces": interfaces(args.fleet, args.machine, args.subnet_id, args.group_id),
            "metadata_options": {"http_endpoint": "enabled", "http_tokens": "required", "http_put_response_hop_limit": 2},
            "block_device_mappings": [{"device_name": "/dev/sda1", "ebs": _disk(args.fleet)}],
            "placement": {"group_name": group} if group else None,
            **purchase(args.fleet.capacity),
        }
        template = ec2.LaunchTemplate(
            name,
            image_id=args.image,
            user_data=args.startup,
            **launched,
            opts=pulumi.ResourceOptions(
                parent=self,
                depends_on=args.after,
                replacement_trigger=[launched, args.fleet.image or "", args.prepared_for],
                # A stack without a pin stays with the image of its first `up`: a newer one must not replace nodes at work.
                ignore_changes=None if args.fleet.image else ["imageId"],
            ),
        )
        self.instances = [
            ec2.Instance(
                f"{name}-{index}",
                launch_template={"id": template.id, "version": "1"},
                tags={"Name": f"{name}-{index}"},
                # Not in the template: with a new version of that, a change of a tag would replace the nodes.
                volume_tags=args.tags | {"Name": f"{name}-{index}"},
                opts=pulumi.ResourceOptions(parent=self, delete_before_replace=True),
            )
            for index in range(args.fleet.nodes)
        ]
        self.addresses = [instance.private_ip for instance in self.instances]
        self.register_outputs({"addresses": self.addresses})


def interfaces(fleet: Fleet, machine: Machine, subnet: pulumi.Input[str], group: pulumi.Input[str]) -> list[Any]:
    """The launch template's network interfaces. Subnet and group belong to each of them; a node has no public address."""
    nics = machine.nics()[: fleet.nics]
    return [
        {
            "network_card_index": nic.card,
            "device_index": nic.device,
            "interface_type": nic.kind,
            "subnet_id": subnet,
            "security_groups": [group],
            "delete_on_termination": "true",
        }
        # Several interfaces take no word on public addresses; the subnet gives none.
        | ({"associate_public_ip_address": "false"} if len(nics) == 1 else {})
        for nic in nics
    ]


def _disk(fleet: Fleet) -> Any:
    size = round(gigabytes(fleet.disk.partition("..")[0])) if fleet.disk else DISK
    return {
        "volume_size": size,
        "volume_type": "gp3",
        "throughput": 500,
        "iops": 6000,
        "encrypted": "true",
        "delete_on_termination": "true",
    }
