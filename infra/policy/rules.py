"""The rules as plain functions over what the program registers; the standard library alone, as the pack has an environment of its own.

A rule takes one resource and all of them, and yields each violation. EXCEPTIONS are those that the design asks for, each with its reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from ipaddress import ip_network
from typing import Any

TAGS = ("project", "stack", "environment")
WIDEST = 8  # bits of a network's prefix; what is wider admits nearly everybody
# rule -> (pattern of the resource's type and name, why it may)
EXCEPTIONS = {
    "no_public_address": (
        r"(aws:ec2/(eip:Eip|instance:Instance)|gcp:compute/instance:Instance) .*-bastion",
        "the one machine that is reached from outside: small, without GPU, open to the networks of flotilla:access.allow alone",
    ),
    "no_open_ingress": (
        r"aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule .*-ssh",
        "dstack adds SSH from anywhere to its group where it is not there; the nodes are in private subnets, which nothing outside reaches",
    ),
    "tagged": (
        r"pulumi:providers:gcp gcp-plain",
        "instance templates cannot change their labels in place, services have none",
    ),
}
# Calls that take no narrower resource than *, or exist once for an account: https://docs.aws.amazon.com/service-authorization/
ACCOUNT_WIDE = (
    *("cloudwatch:PutMetricData", "ec2:Describe*", "ec2:GetEbsEncryptionByDefault", "ec2:GetInstanceMetadataDefaults"),
    *("ec2:DisableEbsEncryptionByDefault", "ec2:EnableEbsEncryptionByDefault", "ec2:ModifyInstanceMetadataDefaults"),
    *("ecr:GetAuthorizationToken", "kms:CreateKey", "logs:DescribeLogGroups"),
    *("servicequotas:GetServiceQuota", "servicequotas:ListServiceQuotas", "ssm:UpdateInstanceInformation", "ssmmessages:*Channel"),
)
COMPANIONS = ("BucketPublicAccessBlock", "BucketVersioning", "BucketServerSideEncryptionConfiguration", "BucketPolicy")
EVERYBODY = ("allUsers", "allAuthenticatedUsers")


@dataclass(frozen=True)
class Resource:
    """A registered resource, less its outputs; `type` such as aws:ec2/vpc:Vpc."""

    type: str
    name: str
    props: Mapping[str, Any]

    @property
    def kind(self) -> str:
        return self.type.rpartition(":")[2]

    @property
    def cloud(self) -> str:
        return self.type.partition(":")[0]


Rule = Callable[[Resource, Iterable[Resource]], Iterator[str]]


def no_public_address(resource: Resource, _: Iterable[Resource]) -> Iterator[str]:
    """Nodes have private addresses alone."""
    props = resource.props
    if resource.cloud == "aws":
        for nic in (props, *_list(props, "networkInterfaces")):
            if _true(nic.get("associatePublicIpAddress")):
                yield "gets a public address"
        if _true(props.get("mapPublicIpOnLaunch")):
            yield "gives every machine in it a public address"
        if resource.kind == "Eip" and props.get("instance") is not None:
            yield "is the public address of a machine"
    if resource.cloud == "gcp" and resource.kind.startswith("Instance"):
        for nic in _list(props, "networkInterfaces"):
            if nic.get("accessConfigs") or nic.get("ipv6AccessConfigs"):
                yield "gets a public address"


def no_open_ingress(resource: Resource, _: Iterable[Resource]) -> Iterator[str]:
    """Nothing lets the internet in, and rules are resources of their own, so that each shows in a plan."""
    props = resource.props
    if resource.kind in ("SecurityGroup", "DefaultSecurityGroup") and props.get("ingress"):
        yield "has rules of its own; declare them as SecurityGroupIngressRule"
    if resource.kind == "SecurityGroupIngressRule":
        ranges = [props.get("cidrIpv4"), props.get("cidrIpv6")]
    elif resource.kind == "SecurityGroupRule" and props.get("type") == "ingress":
        ranges = [*props.get("cidrBlocks", []), *props.get("ipv6CidrBlocks", [])]
    elif resource.kind == "Firewall" and props.get("direction", "INGRESS") == "INGRESS" and props.get("allows"):
        if not (props.get("sourceRanges") or props.get("sourceTags") or props.get("sourceServiceAccounts")):
            yield "names no source, which is everybody"
        ranges = props.get("sourceRanges") or []
    else:
        return
    for cidr in ranges:
        if cidr is not None and ip_network(cidr).prefixlen < WIDEST:
            yield f"lets {cidr} in"


def encrypted_disks(resource: Resource, _: Iterable[Resource]) -> Iterator[str]:
    """Disks of AWS are encrypted by setting; those of GCP always are."""
    props = resource.props
    if resource.type == "aws:ec2/instance:Instance" and not props.get("launchTemplate"):
        if not _true((props.get("rootBlockDevice") or {}).get("encrypted")):
            yield "has a root disk that is not encrypted"
    elif resource.kind == "LaunchTemplate":
        if not props.get("blockDeviceMappings"):
            yield "says nothing of the root disk, which is then not encrypted"
        for disk in _list(props, "blockDeviceMappings"):
            if not _true((disk.get("ebs") or {}).get("encrypted")):
                yield f"has a disk {disk.get('deviceName')} that is not encrypted"
    elif resource.type == "aws:ebs/volume:Volume" and not _true(props.get("encrypted")):
        yield "is not encrypted"
    elif resource.kind == "LustreFileSystem" and not props.get("kmsKeyId"):
        yield "is not encrypted with a key of its own"


def metadata_by_token(resource: Resource, _: Iterable[Resource]) -> Iterator[str]:
    """A machine's credentials are not read through a confused proxy: IMDSv2 on AWS."""
    machine = resource.kind == "LaunchTemplate" or (
        resource.type == "aws:ec2/instance:Instance" and not resource.props.get("launchTemplate")
    )
    if machine and (resource.props.get("metadataOptions") or {}).get("httpTokens") != "required":
        yield "answers metadata requests without a token (IMDSv1)"


def private_buckets(resource: Resource, resources: Iterable[Resource]) -> Iterator[str]:
    """Buckets are private, versioned (or keep what was deleted), encrypted, and on AWS refuse requests without TLS."""
    props = resource.props
    if resource.type == "aws:s3/bucket:Bucket":
        beside = {other.kind for other in resources if other.name == resource.name}
        for kind in COMPANIONS:
            if kind not in beside:
                yield f"has no {kind} of its name"
    elif resource.kind == "BucketPublicAccessBlock":
        for key in ("blockPublicAcls", "blockPublicPolicy", "ignorePublicAcls", "restrictPublicBuckets"):
            if not _true(props.get(key)):
                yield f"leaves {key} off"
    elif resource.kind == "BucketVersioning" and (props.get("versioningConfiguration") or {}).get("status") != "Enabled":
        yield "does not keep what is replaced"
    elif resource.type == "aws:s3/bucketPolicy:BucketPolicy" and "aws:SecureTransport" not in str(props.get("policy")):
        yield "does not refuse requests without TLS"
    elif resource.type == "gcp:storage/bucket:Bucket":
        if props.get("publicAccessPrevention") != "enforced":
            yield "may be made public"
        if not _true(props.get("uniformBucketLevelAccess")):
            yield "has access lists for single objects"
        if not (props.get("softDeletePolicy") or {}).get("retentionDurationSeconds"):
            yield "does not keep what is deleted"


def tagged(resource: Resource, _: Iterable[Resource]) -> Iterator[str]:
    """Providers put project, stack and environment on all that they make."""
    key = {"pulumi:providers:aws": "defaultTags", "pulumi:providers:gcp": "defaultLabels"}.get(resource.type)
    if key is None:
        return
    given = _decoded(resource.props.get(key))
    given = given.get("tags", {}) if key == "defaultTags" else given
    for tag in TAGS:
        if not given.get(tag):
            yield f"puts no {tag} on what it makes"


def narrow_rights(resource: Resource, _: Iterable[Resource]) -> Iterator[str]:
    """IAM names actions and resources, and never everybody."""
    props = resource.props
    if resource.cloud == "aws":
        for key in ("policy", "assumeRolePolicy"):
            for statement in _statements(_decoded(props.get(key))):
                yield from _trusting(statement)
                if resource.kind not in ("Key", "KeyPolicy"):  # in a key's own policy * is the key
                    yield from _wide(statement)
    if resource.cloud == "gcp":
        if props.get("role") in ("roles/owner", "roles/editor"):
            yield f"gives {props['role']}"
        for member in (props.get("member"), *(props.get("members") or [])):
            if member in EVERYBODY:
                yield f"gives rights to {member}"
        for permission in props.get("permissions") or [] if resource.kind == "IAMCustomRole" else []:
            if "*" in permission:
                yield f"gives {permission}"


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


def _list(props: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    return list(props.get(key) or [])


def _true(value: Any) -> bool:
    """Launch templates hold booleans as text."""
    return value is True or value == "true"


def _decoded(value: Any) -> Mapping[str, Any]:
    """A document that may be held as text."""
    return (json.loads(value) if isinstance(value, str) else value) or {}


RULES: tuple[Rule, ...] = (no_public_address, no_open_ingress, encrypted_disks, metadata_by_token, private_buckets, tagged, narrow_rights)


def excepted(rule: Rule, resource: Resource) -> bool:
    pattern, _ = EXCEPTIONS.get(rule.__name__, (r"(?!)", ""))
    return re.fullmatch(pattern, f"{resource.type} {resource.name}") is not None


def violations(rule: Rule, resources: Iterable[Resource]) -> Iterator[tuple[Resource, str]]:
    """Each resource that breaks a rule, with the violation, without the exceptions."""
    everything = list(resources)
    for resource in everything:
        if not excepted(rule, resource):
            for violation in rule(resource, everything):
                yield resource, violation
