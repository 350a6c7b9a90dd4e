"""The control node: a small private machine that runs the dstack server, reached through SSM alone.

What the server knows is on a disk of its own, with snapshots: a new machine takes it over. The machine is replaced where what it boots
changes, the old one first, as the disk is at one machine at a time.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pulumi
from pulumi_aws import cloudwatch, dlm, ebs, ec2, iam, ssm, vpc

from infra import control
from infra.aws import policies
from infra.aws.network import ANYWHERE
from infra.cluster_token import Secret
from stacks.schema import Stack
from stacks.site import Site

IMAGE = "/aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/ami-id"  # has the SSM agent
PART = Path(__file__).with_name("control.sh")
SNAPSHOTS = 7  # one a day
MINUTES = 3  # for which the machine's checks fail before it is started again


@dataclass(frozen=True)
class ControlArgs:
    """`backend` as dstack's server takes it, None where it launches no machines; `server_policy`, by ARN, is what it may do then."""

    stack: Stack
    account: policies.Account
    machine: str
    image: str
    vpc_id: pulumi.Input[str]
    subnet_id: pulumi.Input[str]
    zone: str
    backend: pulumi.Output[Site]
    server_policy: pulumi.Output[str] | None
    boundary: pulumi.Input[str] | None
    after: list[pulumi.Resource]  # what the machine needs when it starts


class Control(control.ControlNode):
    """`instance_id` is the machine, `token` the admin's of its server."""

    def __init__(self, name: str, args: ControlArgs, opts: pulumi.ResourceOptions | None = None):
        super().__init__("flotilla:aws:Control", name, None, opts)
        self._child, self._label = pulumi.ResourceOptions(parent=self), f"{name}-control"
        label, child, kept = self._label, self._child, args.stack.protect
        self.token = pulumi.Output.secret(Secret(f"{label}-token", opts=child).token)
        secret = ssm.Parameter(
            label, name=f"/flotilla/{args.stack.name}/server-token", type=ssm.ParameterType.SECURE_STRING, value=self.token, opts=child
        )
        disk = ebs.Volume(
            label,
            availability_zone=args.zone,
            size=control.DISK,
            type="gp3",
            encrypted=True,
            final_snapshot=kept,
            tags={"Name": label},
            # AWS may offer the type in an earlier zone tomorrow: disk and machine stay where they are, with all that the server knows.
            opts=pulumi.ResourceOptions(parent=self, protect=kept, retain_on_delete=kept, ignore_changes=["availabilityZone"]),
        )
        boots = pulumi.Output.all(args.backend, disk.id, secret.arn).apply(lambda known: startup(args.stack, *known))
        profile = self._identity(args, secret)
        instance = ec2.Instance(
            label,
            ami=args.image,
            instance_type=args.machine,
            subnet_id=args.subnet_id,
            vpc_security_group_ids=[self._group(args)],
            iam_instance_profile=profile,
            metadata_options={"http_tokens": "required", "http_endpoint": "enabled", "http_put_response_hop_limit": 1},
            root_block_device={"encrypted": True, "volume_type": "gp3", "volume_size": 16},
            maintenance_options={"auto_recovery": "default"},
            user_data=boots,
            user_data_replace_on_change=True,
            tags={"Name": label},
            # A newer image is no reason to replace it: it updates itself.
            opts=pulumi.ResourceOptions(parent=self, ignore_changes=["ami", "subnetId"], delete_before_replace=True, depends_on=args.after),
        )
        ec2.VolumeAttachment(
            label,
            device_name="/dev/sdf",
            volume_id=disk.id,
            instance_id=instance.id,
            stop_instance_before_detaching=True,  # the server ends before its database goes
            opts=pulumi.ResourceOptions(parent=self, delete_before_replace=True),
        )
        self._backups(args)
        self._restarts(args, instance)
        self.instance_id = instance.id
        self.register_outputs({"instance": instance.id, "disk": disk.id})

    def _group(self, args: ControlArgs) -> pulumi.Output[str]:
        """Nothing comes in: the agent of SSM calls out."""
        label = self._label
        group = ec2.SecurityGroup(label, description="The dstack server.", vpc_id=args.vpc_id, tags={"Name": label}, opts=self._child)
        vpc.SecurityGroupEgressRule(f"{label}-out", security_group_id=group.id, ip_protocol="-1", cidr_ipv4=ANYWHERE, opts=self._child)
        return group.id

    def _role(self, name: str, args: ControlArgs, service: str) -> iam.Role:
        path = policies.path(args.stack.name)
        return iam.Role(name, path=path, assume_role_policy=policies.trust(service), permissions_boundary=args.boundary, opts=self._child)

    def _identity(self, args: ControlArgs, secret: ssm.Parameter) -> pulumi.Output[str]:
        """What a dstack server may do, and read its own token."""
        label = self._label
        role = self._role(label, args, "ec2.amazonaws.com")
        iam.RolePolicy(f"{label}-ssm", role=role.id, policy=json.dumps(policies.ssm_agent()), opts=self._child)
        reads = secret.arn.apply(lambda arn: json.dumps(policies.server_token(arn)))
        iam.RolePolicy(f"{label}-token", role=role.id, policy=reads, opts=self._child)
        if args.server_policy:
            iam.RolePolicyAttachment(f"{label}-server", role=role.name, policy_arn=args.server_policy, opts=self._child)
        return iam.InstanceProfile(label, path=policies.path(args.stack.name), role=role.name, opts=self._child).name

    def _backups(self, args: ControlArgs) -> None:
        label = f"{self._label}-backups"
        role = self._role(label, args, "dlm.amazonaws.com")
        iam.RolePolicy(label, role=role.id, policy=json.dumps(policies.snapshots(args.account, self._label)), opts=self._child)
        dlm.LifecyclePolicy(
            label,
            description="The disk of the dstack server.",
            execution_role_arn=role.arn,
            state="ENABLED",
            policy_details={
                "resource_types": ["VOLUME"],
                "target_tags": {"Name": self._label},
                "schedules": [
                    {
                        "name": "daily",
                        "create_rule": {"interval": 24, "interval_unit": "HOURS", "times": "03:30"},
                        "retain_rule": {"count": SNAPSHOTS},
                        "copy_tags": True,
                    }
                ],
            },
            opts=self._child,
        )

    def _restarts(self, args: ControlArgs, instance: ec2.Instance) -> None:
        """A machine that hangs is started again; one whose host fails EC2 moves by itself (`auto_recovery`)."""
        cloudwatch.MetricAlarm(
            self._label,
            alarm_description="Starts the dstack server's machine again.",
            namespace="AWS/EC2",
            metric_name="StatusCheckFailed_Instance",
            dimensions={"InstanceId": instance.id},
            statistic="Maximum",
            comparison_operator="GreaterThanThreshold",
            threshold=0,
            period=60,
            evaluation_periods=MINUTES,
            alarm_actions=[f"arn:{args.account.partition}:automate:{args.account.region}:ec2:reboot"],
            opts=self._child,
        )


def startup(stack: Stack, site: Site, disk: str, secret: str) -> str:
    """User data; `secret` is the parameter's ARN."""
    return control.script(stack, site, PART, {"volume": disk, "secret": secret})
