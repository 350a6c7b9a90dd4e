"""What a stack may not create on AWS: the rules of the policy pack (infra/policy), each a function of its name.

The standard library alone, as the pack has an environment of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from infra.aws import policy_rights
from infra.policy.shared import Exempt, Resource, decoded, is_true, items, missing_tags, open_ranges

SMALL = r"t\d\w*\.(nano|micro|small)"  # of a machine that is reached from outside
EXCEPTIONS = {
    "no_public_address": (
        Exempt(
            "aws:ec2/eip:Eip",
            "flotilla-{stack}-bastion",
            "the one machine that is reached from outside: small, without GPU, open to the networks of flotilla:access.allow alone",
            lambda props: not props.get("networkInterface"),
        ),
    ),
    "no_open_ingress": (
        Exempt(
            "aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule",
            "flotilla-{stack}-ssh",
            "dstack adds SSH from anywhere to its group where it is not there; nothing outside reaches the private subnets of nodes",
            lambda props: (props.get("fromPort"), props.get("toPort"), props.get("ipProtocol")) == (22, 22, "tcp"),
        ),
    ),
}
# Each kind that a stack makes, by its module. A kind that is new here needs what it must look like in the rules below.
KINDS = frozenset(
    f"aws:{module}/{kind[0].lower()}{kind[1:]}:{kind}"
    for module, kinds in {
        "budgets": "Budget",
        "cloudwatch": "LogGroup MetricAlarm",
        "dlm": "LifecyclePolicy",
        "ebs": "EncryptionByDefault Volume",
        "ec2": (
            "DefaultSecurityGroup Eip FlowLog Instance InstanceMetadataDefaults InternetGateway KeyPair LaunchTemplate "
            "NatGateway PlacementGroup Route RouteTable RouteTableAssociation SecurityGroup Subnet VolumeAttachment "
            "Vpc VpcEndpoint"
        ),
        "fsx": "DataRepositoryAssociation LustreFileSystem",
        "iam": "InstanceProfile OpenIdConnectProvider Policy Role RolePolicy RolePolicyAttachment",
        "kms": "Key KeyPolicy",
        "s3": (
            "Bucket BucketLifecycleConfiguration BucketOwnershipControls BucketPolicy BucketPublicAccessBlock "
            "BucketServerSideEncryptionConfiguration BucketVersioning"
        ),
        "ssm": "Parameter",
        "vpc": "SecurityGroupEgressRule SecurityGroupIngressRule",
    }.items()
    for kind in kinds.split()
)
GITHUB = f"https://{policy_rights.ISSUER}"
COMPANIONS = ("BucketPublicAccessBlock", "BucketVersioning", "BucketServerSideEncryptionConfiguration", "BucketPolicy")


def no_public_address(resource: Resource) -> Iterator[str]:
    props = resource.props
    for nic in (props, *items(props, "networkInterfaces")):
        if is_true(nic.get("associatePublicIpAddress")):
            yield "gets a public address"
        if nic.get("ipv6AddressCount") or nic.get("ipv6Addresses") or is_true(nic.get("associateCarrierIpAddress")):
            yield "gets a public address"
    if is_true(props.get("mapPublicIpOnLaunch")) or is_true(props.get("assignIpv6AddressOnCreation")):
        yield "gives every machine in it a public address"
    if resource.kind == "Eip" and (props.get("instance") or props.get("networkInterface")):
        yield "is the public address of a machine"
    own = f"flotilla-{resource.stack}-bastion"
    if resource.type == "aws:ec2/instance:Instance" and resource.name == own and not re.fullmatch(SMALL, str(props.get("instanceType"))):
        yield f"is reached from outside, and a {props.get('instanceType')}"


def no_open_ingress(resource: Resource) -> Iterator[str]:
    """Rules are resources of their own, so that each shows in a plan."""
    props = resource.props
    if resource.kind in ("SecurityGroup", "DefaultSecurityGroup") and props.get("ingress"):
        yield "has rules of its own; declare them as SecurityGroupIngressRule"
    if resource.kind == "SecurityGroupIngressRule":
        yield from open_ranges([props.get("cidrIpv4"), props.get("cidrIpv6")])
        if listed := props.get("prefixListId"):
            yield f"lets in whoever {listed} lists"


def encrypted_disks(resource: Resource) -> Iterator[str]:
    props = resource.props
    if resource.type == "aws:ec2/instance:Instance":
        root = props.get("rootBlockDevice") or {}
        if not (is_true(root.get("encrypted")) or (props.get("launchTemplate") and not root)):
            yield "has a root disk that is not encrypted"
        for disk in items(props, "ebsBlockDevices"):
            if not is_true(disk.get("encrypted")):
                yield f"has a disk {disk.get('deviceName')} that is not encrypted"
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
    options = resource.props.get("metadataOptions")
    from_template = resource.props.get("launchTemplate") and not options
    machine = resource.kind == "LaunchTemplate" or (resource.type == "aws:ec2/instance:Instance" and not from_template)
    if machine and (options or {}).get("httpTokens") != "required":
        yield "answers metadata requests without a token (IMDSv1)"


def private_buckets(resource: Resource) -> Iterator[str]:
    props = resource.props
    if resource.kind == "BucketPublicAccessBlock":
        for key in ("blockPublicAcls", "blockPublicPolicy", "ignorePublicAcls", "restrictPublicBuckets"):
            if not is_true(props.get(key)):
                yield f"leaves {key} off"
    elif resource.kind == "BucketVersioning" and (props.get("versioningConfiguration") or {}).get("status") != "Enabled":
        yield "does not keep what is replaced"
    elif resource.kind == "BucketOwnershipControls" and (props.get("rule") or {}).get("objectOwnership") != "BucketOwnerEnforced":
        yield "has access lists for single objects"
    elif resource.type == "aws:s3/bucket:Bucket":
        for key in ("acl", "grants", "policy", "website"):
            if props.get(key):
                yield f"has {key} of its own"
    elif resource.type == "aws:s3/bucketPolicy:BucketPolicy":
        found = policy_rights.statements(decoded(props.get("policy")))
        if not any(map(policy_rights.refuses_plain_requests, found)):
            yield "does not refuse requests without TLS"
        if any(statement.get("Effect") != "Deny" for statement in found):
            yield "lets somebody in; policies of roles do"


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
    props, kind = resource.props, resource.kind
    for statement in policy_rights.statements(decoded(props.get("assumeRolePolicy"))):
        yield from policy_rights.trusting(statement)
    inline = [each.get("policy") for each in items(props, "inlinePolicies")] if kind == "Role" else []
    judge = policy_rights.sharing if kind in ("Key", "KeyPolicy") else policy_rights.wide
    for document in (props.get("policy") if resource.type != "aws:s3/bucketPolicy:BucketPolicy" else None, *inline):
        for statement in policy_rights.statements(decoded(document)):
            yield from judge(statement)
    attached = [*(props.get("managedPolicyArns") or []), *([props.get("policyArn")] if kind == "RolePolicyAttachment" else [])]
    for arn in attached:
        if not _own(str(arn), resource.stack):
            yield f"attaches {arn}, which is not the stack's"
    if kind == "OpenIdConnectProvider" and (props.get("url"), [*(props.get("clientIdLists") or [])]) != (GITHUB, ["sts.amazonaws.com"]):
        yield f"trusts {props.get('url')}"


def _own(arn: str, stack: str) -> bool:
    """Whether a managed policy is one that the stack makes; AWS's own are of no account."""
    path = re.escape(f"flotilla/{stack}/")
    return bool(stack) and re.fullmatch(rf"arn:aws[\w-]*:iam::\d{{12}}:policy/({path})?flotilla-{re.escape(stack)}-[\w-]+", arn) is not None
