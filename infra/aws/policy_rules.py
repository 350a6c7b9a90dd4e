"""What a stack may not create on AWS: the rules of the policy pack (infra/policy), each a function of its name.

The standard library alone, as the pack has an environment of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from infra.policy.shared import Resource, decoded, is_true, items, missing_tags, open_ranges

# rule -> (pattern of the resource's type and name, why it may)
EXCEPTIONS = {
    "no_public_address": (
        r"aws:ec2/(eip:Eip|instance:Instance) .*-bastion",
        "the one machine that is reached from outside: small, without GPU, open to the networks of flotilla:access.allow alone",
    ),
    "no_open_ingress": (
        r"aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule .*-ssh",
        "dstack adds SSH from anywhere to its group where it is not there; the nodes are in private subnets, which nothing outside reaches",
    ),
}
# Calls that take no narrower resource than *, or exist once for an account: https://docs.aws.amazon.com/service-authorization/
ACCOUNT_WIDE = (
    *("cloudwatch:PutMetricData", "ec2:Describe*", "ec2:GetEbsEncryptionByDefault", "ec2:GetInstanceMetadataDefaults"),
    *("ec2:DisableEbsEncryptionByDefault", "ec2:EnableEbsEncryptionByDefault", "ec2:ModifyInstanceMetadataDefaults"),
    *("cloudwatch:DescribeAlarms", "dlm:CreateLifecyclePolicy", "dlm:GetLifecyclePolicies", "ssm:DescribeParameters"),
    *("ecr:GetAuthorizationToken", "kms:CreateKey", "logs:DescribeLogGroups"),
    *("servicequotas:GetServiceQuota", "servicequotas:ListServiceQuotas", "ssm:UpdateInstanceInformation", "ssmmessages:*Channel"),
)
COMPANIONS = ("BucketPublicAccessBlock", "BucketVersioning", "BucketServerSideEncryptionConfiguration", "BucketPolicy")


def no_public_address(resource: Resource) -> Iterator[str]:
    props = resource.props
    for nic in (props, *items(props, "networkInterfaces")):
        if is_true(nic.get("associatePublicIpAddress")):
            yield "gets a public address"
    if is_true(props.get("mapPublicIpOnLaunch")):
        yield "gives every machine in it a public address"
    if resource.kind == "Eip" and props.get("instance") is not None:
        yield "is the public address of a machine"


def no_open_ingress(resource: Resource) -> Iterator[str]:
    """Rules are resources of their own, so that each shows in a plan."""
    props = resource.props
    if resource.kind in ("SecurityGroup", "DefaultSecurityGroup") and props.get("ingress"):
        yield "has rules of its own; declare them as SecurityGroupIngressRule"
    if resource.kind == "SecurityGroupIngressRule":
        yield from open_ranges([props.get("cidrIpv4"), props.get("cidrIpv6")])
    elif resource.kind == "SecurityGroupRule" and props.get("type") == "ingress":
        yield from open_ranges([*props.get("cidrBlocks", []), *props.get("ipv6CidrBlocks", [])])


def encrypted_disks(resource: Resource) -> Iterator[str]:
    props = resource.props
    if resource.type == "aws:ec2/instance:Instance" and not props.get("launchTemplate"):
        if not is_true((props.get("rootBlockDevice") or {}).get("encrypted")):
            yield "has a root disk that is not encrypted"
    elif resource.kind == "LaunchTemplate":
        if not props.get("blockDeviceMappings"):
            yield "says nothing of the root disk, which is then not encrypted"
        for disk in items(props, "blockDeviceMappings"):
            if not is_true((disk.get("ebs") or {}).get("encrypted")):
                yield f"has a disk {disk.get('deviceName')} that is not encrypted"
    elif resource.type == "aws:ebs/volume:Volume" and not is_true(props.get("encrypted")):
        yield "is not encrypted"
    elif resource.kind == "LustreFileSystem" and not props.get("kmsKeyId"):
        yield "is not encrypted with a key of its own"


def metadata_by_token(resource: Resource) -> Iterator[str]:
    """IMDSv2."""
    machine = resource.kind == "LaunchTemplate" or (
        resource.type == "aws:ec2/instance:Instance" and not resource.props.get("launchTemplate")
    )
    if machine and (resource.props.get("metadataOptions") or {}).get("httpTokens") != "required":
        yield "answers metadata requests without a token (IMDSv1)"


def private_buckets(resource: Resource) -> Iterator[str]:
    props = resource.props
    if resource.kind == "BucketPublicAccessBlock":
        for key in ("blockPublicAcls", "blockPublicPolicy", "ignorePublicAcls", "restrictPublicBuckets"):
            if not is_true(props.get(key)):
                yield f"leaves {key} off"
    elif resource.kind == "BucketVersioning" and (props.get("versioningConfiguration") or {}).get("status") != "Enabled":
        yield "does not keep what is replaced"
    elif resource.type == "aws:s3/bucketPolicy:BucketPolicy" and "aws:SecureTransport" not in str(props.get("policy")):
        yield "does not refuse requests without TLS"


def complete_buckets(resource: Resource, resources: Iterable[Resource]) -> Iterator[str]:
    if resource.type == "aws:s3/bucket:Bucket":
        beside = {other.kind for other in resources if other.name == resource.name}
        for kind in COMPANIONS:
            if kind not in beside:
                yield f"has no {kind} of its name"


def tagged(resource: Resource) -> Iterator[str]:
    if resource.type == "pulumi:providers:aws":
        yield from missing_tags(decoded(resource.props.get("defaultTags")).get("tags", {}))


def narrow_rights(resource: Resource) -> Iterator[str]:
    props = resource.props
    for key in ("policy", "assumeRolePolicy"):
        for statement in _statements(decoded(props.get(key))):
            yield from _trusting(statement)
            if resource.kind not in ("Key", "KeyPolicy"):  # in a key's own policy * is the key
                yield from _wide(statement)


def _statements(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    statements = document.get("Statement", [])
    return [statements] if isinstance(statements, Mapping) else list(statements)


def _trusting(statement: Mapping[str, Any]) -> Iterator[str]:
    """A role that AWS will only make later can be named in a condition alone."""
    named = any("aws:PrincipalArn" in test for test in (statement.get("Condition") or {}).values())
    if statement.get("Effect") == "Allow" and statement.get("Principal") in ("*", {"AWS": "*"}) and not named:
        yield "trusts everybody"


def _wide(statement: Mapping[str, Any]) -> Iterator[str]:
    if statement.get("Effect") != "Allow":
        return
    if "NotAction" in statement or "NotResource" in statement:
        yield "allows all but what it names"
    actions = _several(statement.get("Action"))
    for action in actions:
        if re.fullmatch(r"\*|\w+:\*", action):
            yield f"allows {action}"
        elif "*" in _several(statement.get("Resource")) and not any(fnmatchcase(action, known) for known in ACCOUNT_WIDE):
            yield f"allows {action} on all resources"


def _several(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value or [])
