"""What nodes may do, and what the dstack server may do."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pulumi
from pulumi_aws import cloudwatch, iam

from infra.aws import policies
from infra.aws.network import LOG_DAYS
from infra.aws.storage import Bucket, Given


@dataclass(frozen=True)
class IdentityArgs:
    """`bucket`: where checkpoints are kept, if in one; `server`: whether dstack launches machines."""

    account: policies.Account
    stack: str
    bucket: Bucket | Given | None
    monitoring: bool
    server: bool
    elsewhere: bool  # whether nodes may be on other clouds, which have no roles of this one
    boundary: pulumi.Input[str] | None  # that a role made by a deployment must have
    shared: tuple[str, ...] = ()  # ARNs of network and subnets that are another account's


class Identity(pulumi.ComponentResource):
    """The instance profile of nodes and, where dstack launches them, the policy for its server."""

    def __init__(self, name: str, args: IdentityArgs, opts: pulumi.ResourceOptions | None = None):
        super().__init__("flotilla:aws:Identity", name, None, opts)
        child = pulumi.ResourceOptions(parent=self)
        path = policies.path(args.stack)
        role = iam.Role(
            f"{name}-node",
            path=path,
            assume_role_policy=policies.trust("ec2.amazonaws.com"),
            permissions_boundary=args.boundary,
            opts=child,
        )
        documents: dict[str, pulumi.Input[str]] = {"images": json.dumps(policies.images(args.account))}
        if args.bucket:
            arns = pulumi.Output.all(args.bucket.arn, args.bucket.key_arn)
            documents["checkpoints"] = arns.apply(lambda arns: json.dumps(policies.checkpoints(*arns)))
        if args.monitoring:  # the agent would make the group too, but nobody would end it, or what is in it
            group = policies.log_group(args.stack)
            cloudwatch.LogGroup(f"{name}-nodes", name=group, retention_in_days=LOG_DAYS, opts=child)
            documents["monitoring"] = json.dumps(policies.monitoring(args.account, args.stack))
        for what, text in documents.items():
            iam.RolePolicy(f"{name}-node-{what}", role=role.id, policy=text, opts=child)
        profile = iam.InstanceProfile(f"{name}-node", path=path, role=role.name, opts=child)
        self.role_arn, self.profile_arn, self.profile_name = role.arn, profile.arn, profile.name
        self.server_policy: pulumi.Output[str] | None = None
        if args.server:
            text = pulumi.Output.all(role.arn, profile.arn).apply(
                lambda arns: json.dumps(policies.dstack_server(args.account, arns[0], arns[1], args.shared))
            )
            self.server_policy = iam.Policy(
                f"{name}-dstack-server", path=path, description="For whoever runs the dstack server of this stack.", policy=text, opts=child
            ).arn
        self.checkpoints_policy: pulumi.Output[str] | None = None
        if args.elsewhere and args.bucket:
            what = "For the user whose keys nodes on other clouds mount the checkpoints by."
            self.checkpoints_policy = iam.Policy(
                f"{name}-checkpoints", path=path, description=what, policy=documents["checkpoints"], opts=child
            ).arn
        self.register_outputs({"profile": profile.name, "server_policy": self.server_policy})
