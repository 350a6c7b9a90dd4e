"""Deployment from GitHub Actions without keys: roles that jobs of one repository take on.

https://docs.github.com/en/actions/how-tos/secure-your-work/security-harden-deployments/oidc-in-aws
Their policies name roles, buckets and log groups by name, keys by tag. EC2 names what it creates itself, so there account and
region are the limit.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import pulumi
from pulumi_aws import iam

from infra.aws import policies
from infra.aws.policies import (
    PULL,
    SSM_AGENT,
    STATE_KEY,
    WRITE_LOGS,
    Account,
    Document,
    Statement,
    allow,
    bucket_arn,
    document,
    spot_role,
    state_bucket,
)

ISSUER = "token.actions.githubusercontent.com"
PROJECT = "flotilla"  # of Pulumi.yaml
MAIN = "ref:refs/heads/main"  # in the subject of a job of that branch
VERBS = ("Create", "Delete")
PAIRS = (  # each is created and deleted by calls of these names
    *("FlowLogs", "InternetGateway", "LaunchTemplate", "NatGateway", "PlacementGroup", "Route", "RouteTable"),
    *("SecurityGroup", "Subnet", "Tags", "Vpc"),
)
CHANGES = (
    *("AllocateAddress", "AssociateAddress", "AssociateRouteTable", "AttachInternetGateway", "AuthorizeSecurityGroupEgress"),
    *("AuthorizeSecurityGroupIngress", "CancelSpotInstanceRequests", "CreateLaunchTemplateVersion", "CreateVpcEndpoint"),
    *("DeleteKeyPair", "DeleteVpcEndpoints", "DetachInternetGateway", "DisassociateAddress", "DisassociateRouteTable"),
    *("ImportKeyPair", "ModifyInstanceAttribute", "ModifyInstanceMetadataOptions", "ModifyLaunchTemplate", "ModifySecurityGroupRules"),
    *("ModifySubnetAttribute", "ModifyVpcAttribute", "ModifyVpcEndpoint", "ReleaseAddress", "ReplaceRoute", "ReplaceRouteTableAssociation"),
    *("RevokeSecurityGroupEgress", "RevokeSecurityGroupIngress", "RunInstances", "TerminateInstances"),
)
ACCOUNT_DEFAULTS = ("DisableEbsEncryptionByDefault", "EnableEbsEncryptionByDefault", "ModifyInstanceMetadataDefaults")
LOG_GROUPS = ("CreateLogGroup", "DeleteLogGroup", "ListTagsForResource", "PutRetentionPolicy", "TagResource", "UntagResource")
KEYS = (
    *("CreateGrant", "DescribeKey", "EnableKeyRotation", "GetKeyPolicy", "GetKeyRotationStatus", "ListResourceTags", "PutKeyPolicy"),
    *("ScheduleKeyDeletion", "TagResource", "UntagResource", "UpdateKeyDescription"),
)
BUCKETS = ("*Bucket*", "*Configuration", "DeleteObject", "DeleteObjectVersion")
LUSTRE = (
    *("CreateDataRepositoryAssociation", "CreateFileSystem", "DeleteDataRepositoryAssociation", "DeleteFileSystem"),
    *("DescribeDataRepositoryAssociations", "DescribeFileSystems", "ListTagsForResource", "TagResource", "UntagResource"),
    *("UpdateDataRepositoryAssociation", "UpdateFileSystem"),
)
LUSTRE_ROLE = ("AttachRolePolicy", "CreateServiceLinkedRole", "PutRolePolicy")  # of the link between Lustre and its bucket
GIVE = ("AttachRolePolicy", "CreateRole", "PutRolePolicy")  # what a boundary limits
ROLES = (
    *("AddRoleToInstanceProfile", "CreateInstanceProfile", "CreatePolicy", "CreatePolicyVersion", "DeleteInstanceProfile"),
    *("DeletePolicy", "DeletePolicyVersion", "DeleteRole", "DeleteRolePolicy", "DetachRolePolicy", "Get*", "List*"),
    *("RemoveRoleFromInstanceProfile", "TagInstanceProfile", "TagPolicy", "TagRole", "UntagInstanceProfile"),
    *("UntagPolicy", "UntagRole", "UpdateAssumeRolePolicy"),
)
TAGS = tuple(f"{verb}{what}" for what in ("OpenIDConnectProvider", "Policy", "Role") for verb in ("Tag", "Untag"))
# Of a control node: its disk, the disk's snapshots, the alarm, the parameter with the token.
DISKS = (
    *("AttachVolume", "CreateSnapshot", "DeleteVolume", "DetachVolume", "ModifyInstanceMaintenanceOptions"),
    *("ModifyVolume", "StartInstances", "StopInstances"),
)
SNAPSHOTS = (
    *("DeleteLifecyclePolicy", "GetLifecyclePolicy", "ListTagsForResource", "TagResource", "UntagResource", "UpdateLifecyclePolicy"),
)
ALARMS = ("DeleteAlarms", "ListTagsForResource", "PutMetricAlarm", "TagResource", "UntagResource")
PARAMETERS = (
    *("AddTagsToResource", "DeleteParameter", "GetParameter", "GetParameters", "ListTagsForResource", "PutParameter"),
    "RemoveTagsFromResource",
)
# What nothing narrower can be said of, and tells no content: which resources there are.
LOOK = ("ec2:Describe*", "ec2:GetEbsEncryptionByDefault", "ec2:GetInstanceMetadataDefaults", "logs:DescribeLogGroups")
LOOK_CONTROL = ("cloudwatch:DescribeAlarms", "dlm:GetLifecyclePolicies", "ssm:DescribeParameters")
# What a refresh reads of each, by the kinds of their ARNs.
READ_BUCKET = ("GetBucket*", "Get*Configuration", "ListBucket")
READ_KEY = ("DescribeKey", "GetKeyPolicy", "GetKeyRotationStatus", "ListResourceTags")
READ_LUSTRE = ("DescribeDataRepositoryAssociations", "DescribeFileSystems", "ListTagsForResource")
READ_BUDGET = ("ListTagsForResource", "ViewBudget")
READ_PARAMETER = ("GetParameter", "GetParameters", "ListTagsForResource")


@dataclass(frozen=True)
class DeployArgs:
    """`provider` is the ARN of the account's OIDC provider for GitHub, of which there can be one; None makes it.

    `control`: whether a control node is among what is deployed. `given`: what nodes may do with a bucket that is there already. `shared`:
    ARNs of network and subnets that are another account's.
    """

    account: Account
    stack: str
    environment: str
    repository: str
    provider: str | None
    control: bool = False
    given: Document | None = None
    shared: tuple[str, ...] = ()


class Deploy(pulumi.ComponentResource):
    """A role that deploys, with a boundary that no role of its making can exceed; and one that previews pull requests."""

    def __init__(self, name: str, args: DeployArgs, opts: pulumi.ResourceOptions | None = None):
        super().__init__("flotilla:aws:Deploy", name, None, opts)
        child = pulumi.ResourceOptions(parent=self)
        # An account has one, which other stacks may trust by the time this one goes.
        kept = pulumi.ResourceOptions(parent=self, retain_on_delete=True)
        provider: pulumi.Input[str] = (
            args.provider
            or iam.OpenIdConnectProvider(f"{name}-github", url=f"https://{ISSUER}", client_id_lists=["sts.amazonaws.com"], opts=kept).arn
        )
        account, stack = args.account, args.stack
        deploys = self._role(f"{name}-deploy", provider, f"repo:{args.repository}:environment:{args.environment}")
        # Pull requests, and on the main branch the look for drift, which asks nobody's approval.
        previews = self._role(f"{name}-preview", provider, *(f"repo:{args.repository}:{where}" for where in ("pull_request", MAIN)))
        most = boundary(account, stack, args.control, args.given, args.shared)
        bounds = iam.Policy(f"{name}-boundary", policy=json.dumps(most), opts=child).arn
        documents: dict[str, pulumi.Input[str]] = {
            "network": json.dumps(network(account, stack, args.shared)),
            "storage": json.dumps(storage(account, stack)),
            "identity": bounds.apply(lambda arn: json.dumps(identity(account, stack, arn))),
        }
        if args.control:
            documents["control"] = json.dumps(control(account, stack))
        for what, text in documents.items():
            iam.RolePolicy(f"{name}-deploy-{what}", role=deploys.id, policy=text, opts=child)
        looks = bounds.apply(lambda arn: json.dumps(preview(account, stack, arn)))
        iam.RolePolicy(f"{name}-preview", role=previews.id, policy=looks, opts=child)
        if args.control:
            iam.RolePolicy(f"{name}-preview-control", role=previews.id, policy=json.dumps(look_at_control(account, stack)), opts=child)
        self.role_arn, self.preview_arn, self.boundary_arn = deploys.arn, previews.arn, bounds
        self.register_outputs({"deploy": deploys.arn, "preview": previews.arn, "boundary": bounds})

    def _role(self, name: str, provider: pulumi.Input[str], *subjects: str) -> iam.Role:
        trusted = pulumi.Output.from_input(provider).apply(lambda arn: json.dumps(github(arn, ISSUER, list(subjects))))
        opts = pulumi.ResourceOptions(parent=self)
        return iam.Role(name, assume_role_policy=trusted, max_session_duration=7200, opts=opts)


def github(provider: str, issuer: str, subjects: list[str]) -> Document:
    """The trust policy of a role that jobs with one of these subjects take on, such as repo:owner/name:environment:prod."""
    return document(
        {
            "Effect": "Allow",
            "Principal": {"Federated": provider},
            "Action": "sts:AssumeRoleWithWebIdentity",
            "Condition": {"StringEquals": {f"{issuer}:aud": "sts.amazonaws.com", f"{issuer}:sub": subjects}},
        }
    )


def boundary(account: Account, stack: str, control: bool, given: Document | None = None, shared: tuple[str, ...] = ()) -> Document:
    """What a role that a deployment makes can ever do: the most that nodes, bastion, flow logs and control node are given."""
    checkpoints = _bucket(account, stack)
    made: list[Document] = [given] if given else []
    if control:
        role, profile = (account.iam(f"{kind}/flotilla/{stack}/*") for kind in ("role", "instance-profile"))
        made += [policies.dstack_server(account, role, profile, shared), policies.server_token(_parameters(account, stack))]
        made += [policies.snapshots(account, f"flotilla-{stack}-control")]
    return document(
        *(statement for each in made for statement in each["Statement"]),
        allow(["s3:*Object", "s3:*Multipart*", "s3:GetBucketLocation", "s3:ListBucket", "s3:ListBucketMultipartUploads"], checkpoints),
        allow(["kms:Decrypt", "kms:GenerateDataKey"], account.arn("kms", "key/*"), _tagged("aws:ResourceTag", stack)),
        allow([f"ecr:{call}" for call in PULL], account.arn("ecr", "repository/*")),
        allow([f"logs:{call}" for call in ("CreateLogGroup", *WRITE_LOGS)], account.arn("logs", "log-group:*")),
        allow(["cloudwatch:PutMetricData", "ecr:GetAuthorizationToken", *SSM_AGENT], "*"),
    )


def network(account: Account, stack: str, shared: tuple[str, ...] = ()) -> Document:
    """Network, nodes and their logs; in what another account shares, machines and security groups alone."""
    calls = [f"{verb}{what}" for what in PAIRS for verb in VERBS]
    return document(
        allow([*LOOK], "*"),
        allow([f"ec2:{call}" for call in (*calls, *CHANGES)], account.arn("ec2", "*")),
        *([allow(["ec2:CreateSecurityGroup", "ec2:RunInstances"], [*shared])] if shared else []),
        allow([f"ec2:{call}" for call in ACCOUNT_DEFAULTS], "*"),
        allow(["ec2:RunInstances"], f"arn:{account.partition}:ec2:{account.region}::image/*"),
        allow(["ssm:GetParameter"], f"arn:{account.partition}:ssm:{account.region}::parameter/aws/service/*"),
        allow([f"logs:{call}" for call in LOG_GROUPS], _log_groups(account, stack)),
    )


def preview(account: Account, stack: str, bounds: str) -> Document:
    """What a preview asks AWS, and what the refresh before it reads; no content of checkpoints or logs."""
    return document(
        allow([*LOOK], "*"),
        allow(["ssm:GetParameter"], f"arn:{account.partition}:ssm:{account.region}::parameter/aws/service/*"),
        allow(["logs:ListTagsForResource"], _log_groups(account, stack)),
        allow([f"s3:{call}" for call in READ_BUCKET], _bucket(account, stack)),
        allow([f"kms:{call}" for call in READ_KEY], account.arn("kms", "key/*"), _tagged("aws:ResourceTag", stack)),
        allow([f"fsx:{call}" for call in READ_LUSTRE], account.arn("fsx", "*")),
        allow([f"budgets:{call}" for call in READ_BUDGET], _budget(account, stack)),
        allow(["iam:Get*", "iam:List*"], [*_ours(account, stack), *_itself(account, stack, bounds)]),
        *state(account, stack, writes=False),
    )


def state(account: Account, stack: str, writes: bool) -> list[Statement]:
    """Of Pulumi's state where infra/aws/bootstrap.py keeps it: this stack's alone; a preview takes no lock and writes nothing.

    Where Pulumi keeps what: https://www.pulumi.com/docs/iac/concepts/state-and-backends/#using-a-self-managed-backend
    """
    bucket = bucket_arn(account, state_bucket(account))
    folders = [*(f"{what}/{PROJECT}/{stack}/*" for what in ("backups", "history")), f"locks/organization/{PROJECT}/{stack}/*"]
    own = [f"{bucket}/.pulumi/{path}" for path in (f"stacks/{PROJECT}/{stack}.json*", *folders)]
    secrets = ["kms:Decrypt", *(["kms:Encrypt", "kms:GenerateDataKey"] if writes else [])]
    return [
        allow(["s3:ListBucket", "s3:GetBucketLocation"], bucket),
        allow(["s3:GetObject"], [f"{bucket}/.pulumi/meta.yaml", *own]),
        *([allow(["s3:DeleteObject", "s3:PutObject"], [f"{bucket}/.pulumi/meta.yaml", *own])] if writes else []),
        allow(secrets, account.arn("kms", "key/*"), {"ForAnyValue:StringEquals": {"kms:ResourceAliases": STATE_KEY}}),
    ]


def storage(account: Account, stack: str) -> Document:
    """Bucket, key, file system, budget, and Pulumi's state."""
    bucket = _bucket(account, stack)
    return document(
        *state(account, stack, writes=True),
        allow([f"s3:{call}" for call in BUCKETS], [bucket, f"{bucket}/*"]),
        allow(["kms:CreateKey"], "*", _tagged("aws:RequestTag", stack)),  # it has no ARN before it is made
        allow([f"kms:{call}" for call in KEYS], account.arn("kms", "key/*"), _tagged("aws:ResourceTag", stack)),
        allow([f"fsx:{call}" for call in LUSTRE], account.arn("fsx", "*")),
        # https://docs.aws.amazon.com/fsx/latest/LustreGuide/setting-up.html#fsx-adding-permissions-s3
        allow([f"iam:{call}" for call in LUSTRE_ROLE], account.iam("role/aws-service-role/s3.data-source.lustre.fsx.amazonaws.com/*")),
        allow([f"budgets:{call}" for call in (*READ_BUDGET, "ModifyBudget", "TagResource", "UntagResource")], _budget(account, stack)),
    )


def identity(account: Account, stack: str, bounds: str) -> Document:
    """Roles of the stack's own path, none beyond the boundary `bounds` (an ARN); those of the deployment itself it reads and tags."""
    ours, itself = _ours(account, stack), _itself(account, stack, bounds)
    services = [f"{service}.amazonaws.com" for service in ("ec2", "vpc-flow-logs")]
    return document(
        allow([f"iam:{call}" for call in GIVE], ours[0], {"StringEquals": {"iam:PermissionsBoundary": bounds}}),
        allow([f"iam:{call}" for call in ROLES], ours),
        spot_role(account),
        allow(["iam:PassRole"], ours[0], {"StringEquals": {"iam:PassedToService": services}}),
        allow(["iam:Get*", "iam:List*", *(f"iam:{call}" for call in TAGS)], itself),
    )


def control(account: Account, stack: str) -> Document:
    """The control node, beside what it shares with nodes and roles."""
    snapshots = f"arn:{account.partition}:ec2:{account.region}::snapshot/*"
    restarts = account.iam("role/aws-service-role/events.amazonaws.com/*")  # by which an alarm starts a machine again
    return document(
        allow([*LOOK_CONTROL], "*"),
        allow(["ec2:CreateVolume"], account.arn("ec2", "volume/*"), _tagged("aws:RequestTag", stack)),
        allow([f"ec2:{call}" for call in DISKS], account.arn("ec2", "*"), _tagged("aws:ResourceTag", stack)),
        allow(["ec2:CreateSnapshot", "ec2:CreateTags"], snapshots),
        allow(["dlm:CreateLifecyclePolicy"], "*", _tagged("aws:RequestTag", stack)),  # it has no ARN before it is made
        allow([f"dlm:{call}" for call in SNAPSHOTS], account.arn("dlm", "policy/*"), _tagged("aws:ResourceTag", stack)),
        allow([f"cloudwatch:{call}" for call in ALARMS], _alarms(account, stack)),
        allow([f"ssm:{call}" for call in PARAMETERS], _parameters(account, stack)),
        allow(["iam:PassRole"], _ours(account, stack)[0], {"StringEquals": {"iam:PassedToService": "dlm.amazonaws.com"}}),
        allow(["iam:CreateServiceLinkedRole"], restarts, {"StringEquals": {"iam:AWSServiceName": "events.amazonaws.com"}}),
        *forward(account, stack),
    )


def forward(account: Account, stack: str) -> list[Statement]:
    """The way to the dstack server with flotilla:dstack.drive: a port of this machine, by this document, and no shell.

    https://docs.aws.amazon.com/systems-manager/latest/userguide/getting-started-restrict-access-quickstart.html
    """
    machine = {"ssm:resourceTag/Name": f"flotilla-{stack}-control", "ssm:resourceTag/stack": stack}
    document_alone = {"BoolIfExists": {"ssm:SessionDocumentAccessCheck": "true"}}
    documents = f"arn:{account.partition}:ssm:{account.region}::document"
    return [
        allow(["ssm:StartSession"], account.arn("ec2", "instance/*"), {"StringEquals": machine} | document_alone),
        allow(["ssm:StartSession"], f"{documents}/AWS-StartPortForwardingSession"),
        allow(["ssm:TerminateSession"], account.arn("ssm", "session/${aws:userid}-*")),
    ]


def look_at_control(account: Account, stack: str) -> Document:
    """What a refresh reads of a control node, the token with it: who previews decrypts the state, which holds it too."""
    return document(
        allow([*LOOK_CONTROL], "*"),
        allow(["dlm:GetLifecyclePolicy", "dlm:ListTagsForResource"], account.arn("dlm", "policy/*")),
        allow(["cloudwatch:ListTagsForResource"], _alarms(account, stack)),
        allow([f"ssm:{call}" for call in READ_PARAMETER], _parameters(account, stack)),
    )


def _alarms(account: Account, stack: str) -> str:
    return account.arn("cloudwatch", f"alarm:flotilla-{stack}-*")


def _parameters(account: Account, stack: str) -> str:
    return account.arn("ssm", f"parameter/flotilla/{stack}/*")


def _log_groups(account: Account, stack: str) -> list[str]:
    names = (f"flotilla-{stack}-*", policies.log_group(stack), f"{policies.log_group(stack)}:*")
    return [account.arn("logs", f"log-group:{name}") for name in names]


def _bucket(account: Account, stack: str) -> str:
    return bucket_arn(account, f"flotilla-{stack}-*")


def _budget(account: Account, stack: str) -> str:
    return f"arn:{account.partition}:budgets::{account.id}:budget/flotilla-{stack}-*"


def _ours(account: Account, stack: str) -> list[str]:
    """What the stack's machines and services are."""
    return [account.iam(f"{kind}/flotilla/{stack}/*") for kind in ("role", "policy", "instance-profile")]


def _itself(account: Account, stack: str, bounds: str) -> list[str]:
    """What deploys: its roles, the provider that it trusts, its boundary."""
    return [account.iam(f"role/flotilla-{stack}-*"), account.iam("oidc-provider/*"), bounds]


def _tagged(key: str, stack: str) -> dict[str, dict[str, str]]:
    return {"StringEquals": {f"{key}/stack": stack}}
