"""The nodes' security group: what EFA needs, and what dstack looks for.

dstack makes a group of its own where it finds none, which no `pulumi destroy` removes, and it adds the rules that it misses. So
the group and the rules are declared here as dstack would make them, and it takes them as they are.
EFA needs all traffic to the group itself in both directions: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-start.html
"""

from __future__ import annotations

from dataclasses import dataclass

import pulumi
from pulumi_aws import ebs, ec2, vpc

ANYWHERE = "0.0.0.0/0"


@dataclass(frozen=True)
class NodeSecurityArgs:
    """`ssh` is the network that may log in. dstack finds a group by its name, so that of its own is fixed."""

    vpc_id: pulumi.Input[str]
    group_name: str | None
    ssh: pulumi.Input[str]


def dstack_group(project: str) -> str:
    """The name by which dstack looks for a project's group."""
    return "dstack_security_group_" + project.replace("-", "_").lower()


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
            f"{name}-ssh", security_group_id=group.id, ip_protocol="tcp", from_port=22, to_port=22, cidr_ipv4=args.ssh, opts=child
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


class AccountDefaults(pulumi.ComponentResource):
    """For all of the account in this region: new disks are encrypted and new instances want IMDSv2; dstack's say neither by themselves."""

    def __init__(self, name: str, opts: pulumi.ResourceOptions | None = None):
        super().__init__("flotilla:aws:AccountDefaults", name, None, opts)
        child = pulumi.ResourceOptions(parent=self)
        ebs.EncryptionByDefault(name, enabled=True, opts=child)
        ec2.InstanceMetadataDefaults(name, http_tokens="required", http_put_response_hop_limit=2, opts=child)
        self.register_outputs({})
