"""The way to nodes with private addresses: a small machine that SSH jumps through."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pulumi
from pulumi_aws import ec2, iam, vpc

from infra.aws import policies
from infra.aws.network import ANYWHERE
from stacks.settings.cloud import Access

# AWS's own name for its newest Amazon Linux, whose image has the SSM agent.
IMAGE = "/aws/service/ami-amazon-linux-latest/al2023-ami-kernel-default-arm64"


@dataclass(frozen=True)
class BastionArgs:
    """`subnet_id` is a public subnet for `via: bastion`, a private one for `via: tunnel`."""

    vpc_id: pulumi.Input[str]
    subnet_id: pulumi.Input[str]
    access: Access
    key_name: pulumi.Input[str]
    image: str
    stack: str
    boundary: pulumi.Input[str] | None
    after: list[pulumi.Resource]  # what a machine needs when it starts


class Bastion(pulumi.ComponentResource):
    """Reached at `address` by the networks that may; or, for a tunnel, by nobody but SSM, as instance `instance_id`."""

    def __init__(self, name: str, args: BastionArgs, opts: pulumi.ResourceOptions | None = None):
        super().__init__("flotilla:aws:Bastion", name, None, opts)
        child = pulumi.ResourceOptions(parent=self)
        label, public = f"{name}-bastion", args.access.via == "bastion"
        group = ec2.SecurityGroup(label, description="The way to the nodes.", vpc_id=args.vpc_id, tags={"Name": label}, opts=child)
        for index, network in enumerate(args.access.allow):
            vpc.SecurityGroupIngressRule(
                f"{label}-ssh-{index}",
                security_group_id=group.id,
                ip_protocol="tcp",
                from_port=22,
                to_port=22,
                cidr_ipv4=str(network),
                opts=child,
            )
        vpc.SecurityGroupEgressRule(f"{label}-out", security_group_id=group.id, ip_protocol="-1", cidr_ipv4=ANYWHERE, opts=child)
        instance = ec2.Instance(
            label,
            ami=args.image,
            instance_type="t4g.nano",
            subnet_id=args.subnet_id,
            vpc_security_group_ids=[group.id],
            key_name=args.key_name,
            iam_instance_profile=None if public else self._ssm(label, args, child),
            metadata_options={"http_tokens": "required", "http_endpoint": "enabled", "http_put_response_hop_limit": 1},
            root_block_device={"encrypted": True, "volume_type": "gp3"},
            user_data=_user(args.access),
            tags={"Name": label},
            # A newer image is no reason to replace it.
            opts=pulumi.ResourceOptions(parent=self, ignore_changes=["ami"], depends_on=args.after),
        )
        self.instance_id = instance.id
        self.address: pulumi.Output[str] | None = None
        if public:
            self.address = ec2.Eip(label, domain="vpc", instance=instance.id, tags={"Name": label}, opts=child).public_ip
        self.register_outputs({"instance": instance.id, "address": self.address})

    def _ssm(self, label: str, args: BastionArgs, child: pulumi.ResourceOptions) -> pulumi.Output[str]:
        path = policies.path(args.stack)
        role = iam.Role(
            label, path=path, assume_role_policy=policies.trust("ec2.amazonaws.com"), permissions_boundary=args.boundary, opts=child
        )
        iam.RolePolicy(label, role=role.id, policy=json.dumps(policies.ssm_agent()), opts=child)
        return iam.InstanceProfile(label, path=path, role=role.name, opts=child).name


def _user(access: Access) -> str:
    """cloud-init: the user by whose name the nodes are reached too."""
    user = {"name": access.user, "ssh_authorized_keys": [access.public_key]}
    return "#cloud-config\n" + json.dumps({"users": ["default", user]}) + "\n"
