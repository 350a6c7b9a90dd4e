"""Deployment from GitHub Actions without keys: roles that jobs of one repository take on.

https://docs.github.com/en/actions/how-tos/secure-your-work/security-harden-deployments/oidc-in-aws
Their policies name roles, buckets and log groups by name; what AWS names itself, such as machines, networks, keys and file systems,
they change and delete by its tag `stack`. What they may create there has the account and the region as its limit.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

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
# Calls on what is not there yet, or is only read by them, or of which AWS knows no tag (the request of a spot machine).
CREATES = (
    *("AllocateAddress", "CancelSpotInstanceRequests", "CreateFlowLogs", "CreateInternetGateway", "CreateLaunchTemplate"),
    *("CreateNatGateway", "CreatePlacementGroup", "CreateRouteTable", "CreateSecurityGroup", "CreateSubnet", "CreateVpc"),
    *("CreateVpcEndpoint", "ImportKeyPair", "RunInstances"),
    # A new VPC's default group has no tag yet when its rules go.
    *("RevokeSecurityGroupEgress", "RevokeSecurityGroupIngress"),
)
# Calls on what is there: by the tag `stack`, which all that a stack makes carries.
DELETES = ("FlowLogs", "InternetGateway", "KeyPair", "LaunchTemplate", "NatGateway", "PlacementGroup", "Route", "RouteTable")
DELETES = (*DELETES, "SecurityGroup", "Subnet", "Tags", "Vpc", "VpcEndpoints")
CHANGES = (
    *("AssociateRouteTable", "AttachInternetGateway", "AuthorizeSecurityGroupEgress", "AuthorizeSecurityGroupIngress"),
    *("CreateLaunchTemplateVersion", "CreateRoute", "CreateTags", "DetachInternetGateway", "DisassociateAddress", "DisassociateRouteTable"),
    *("ModifyInstanceAttribute", "ModifyInstanceMetadataOptions", "ModifyLaunchTemplate", "ModifySecurityGroupRules"),
    *("ModifySubnetAttribute", "ModifyVpcAttribute", "ModifyVpcEndpoint", "ReleaseAddress", "ReplaceRoute", "ReplaceRouteTableAssociation"),
    *("TerminateInstances", *(f"Delete{what}" for what in DELETES)),
)
ACCOUNT_DEFAULTS = ("EnableEbsEncryptionByDefault", "ModifyInstanceMetadataDefaults")  # they stay when the stack goes
LOG_GROUPS = ("CreateLogGroup", "DeleteLogGroup", "ListTagsForResource", "PutRetentionPolicy", "TagResource", "UntagResource")
KEYS = (
    *("DescribeKey", "EnableKeyRotation", "GetKeyPolicy", "GetKeyRotationStatus", "ListResourceTags"),
    *("ScheduleKeyDeletion", "TagResource", "UntagResource", "UpdateKeyDescription"),
)
BUCKETS = ("*Bucket*", "*Configuration", "DeleteObject", "DeleteObjectVersion")
LUSTRE_KEYS = ("CreateGrant", "PutKeyPolicy")
LUSTRE_NEW = ("CreateDataRepositoryAssociation", "CreateFileSystem")
LUSTRE = (
    *("DeleteDataRepositoryAssociation", "DeleteFileSystem", "TagResource", "UntagResource"),
    *("UpdateDataRepositoryAssociation", "UpdateFileSystem"),
)
LUSTRE_ROLE = ("AttachRolePolicy", "CreateServiceLinkedRole", "PutRolePolicy")  # of the link between Lustre and its bucket
GIVE = ("AttachRolePolicy", "CreateRole", "PutRolePolicy")  # what a boundary limits
ROLES = (
    *("AddRoleToInstanceProfile", "CreateInstanceProfile", "DeleteInstanceProfile", "DeleteRole", "DeleteRolePolicy"),
    *("DetachRolePolicy", "Get*", "List*", "RemoveRoleFromInstanceProfile", "TagInstanceProfile", "TagRole"),
    *("UntagInstanceProfile", "UntagRole", "UpdateAssumeRolePolicy"),
)
POLICIES = ("CreatePolicy", "CreatePolicyVersion", "DeletePolicy", "DeletePolicyVersion", "TagPolicy", "UntagPolicy")
TAGS = tuple(f"{verb}{what}" for what in ("OpenIDConnectProvider", "Policy", "Role") for verb in ("Tag", "Untag"))
# Of a control node: its disk, the disk's snapshots, the alarm, the parameter with the token.
DISKS = (
    *("AttachVolume", "CreateSnapshot", "DeleteVolume", "DetachVolume", "ModifyInstanceMaintenanceOptions"),
    *("ModifyVolume", "StartInstances", "StopInstances"),
)
SNAPSHOTS = (*("DeleteLifecyclePolicy", "GetLifecyclePolicy", "TagResource", "UntagResource", "UpdateLifecyclePolicy"),)
ALARMS = ("DeleteAlarms", "ListTagsForResource", "PutMetricAlarm", "TagResource", "UntagResource")
PARAMETERS = (*("AddTagsToResource", "DeleteParameter", "GetParameter", "ListTagsForResource", "PutParameter", "RemoveTagsFromResource"),)
# What nothing narrower can be said of, and tells no content: which resources there are.
LOOK = ("ec2:Describe*", "ec2:GetEbsEncryptionByDefault", "ec2:GetInstanceMetadataDefaults", "logs:DescribeLogGroups")
LOOK_CONTROL = ("cloudwatch:DescribeAlarms", "dlm:GetLifecyclePolicies", "ssm:DescribeParameters")
# What a refresh reads of each, by the kinds of their ARNs.
READ_BUCKET = ("GetBucket*", "Get*Configuration", "ListBucket")
READ_KEY = ("DescribeKey", "GetKeyPolicy", "GetKeyRotationStatus", "ListResourceTags")
READ_LUSTRE = ("DescribeDataRepositoryAssociations", "DescribeFileSystems", "ListTagsForResource")
READ_BUDGET = ("ListTagsForResource", "ViewBudget")
READ_PARAMETER = ("GetParameter", "ListTagsForResource")


@dataclass(frozen=True)
class DeployArgs:
    """`provider` is the ARN of the account's OIDC provider for GitHub, of which there can be one; None makes it.

    `control`, `lustre`, `bastion`, `server`: whether a control node, a file system, a machine that is reached from outside, a policy for
    dstack's server are among what is deployed. `given`: what nodes may do with a bucket that is there already. `shared`:
    ARNs of network and subnets that are another account's.
    """

    account: Account
    stack: str
    environment: str
    repository: str
    provider: str | None
    control: bool = False
    lustre: bool = False
    bastion: bool = False
    server: bool = False
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
        bounds = iam.Policy(f"{name}-boundary", policy=compact(most), opts=child).arn
        documents: dict[str, pulumi.Input[str]] = {
            "deploy-network": compact(network(account, stack, args.shared, args.bastion)),
            "deploy-storage": compact(storage(account, stack, args.lustre)),
            "deploy-identity": bounds.apply(lambda arn: compact(identity(account, stack, arn, args.server))),
            "preview": bounds.apply(lambda arn: compact(preview(account, stack, arn, args.lustre))),
        }
        if args.control:
            documents["deploy-control"] = compact(control(account, stack))
            documents["preview-control"] = compact(look_at_control(account, stack))
        for what, text in documents.items():
            # Managed ones: all inline policies of a role together have 10,240 characters, each of these 6,144.
            rights = iam.Policy(f"{name}-{what}", policy=text, opts=child)
            role = deploys if what.startswith("deploy") else previews
            iam.RolePolicyAttachment(f"{name}-{what}", role=role.name, policy_arn=rights.arn, opts=child)
        self.role_arn, self.preview_arn, self.boundary_arn = deploys.arn, previews.arn, bounds
        self.register_outputs({"deploy": deploys.arn, "preview": previews.arn, "boundary": bounds})

    def _role(self, name: str, provider: pulumi.Input[str], *subjects: str) -> iam.Role:
        trusted = pulumi.Output.from_input(provider).apply(lambda arn: json.dumps(github(arn, ISSUER, list(subjects))))
        opts = pulumi.ResourceOptions(parent=self)
        return iam.Role(name, assume_role_policy=trusted, max_session_duration=7200, opts=opts)


def compact(policy: Document) -> str:
    return json.dumps(policy, separators=(",", ":"))


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
        *(kept for each in made for statement in each["Statement"] if (kept := _without_looks(statement))["Action"]),
        allow(["s3:*Object", "s3:*Multipart*", "s3:GetBucketLocation", "s3:ListBucket", "s3:ListBucketMultipartUploads"], checkpoints),
        allow(["kms:Decrypt", "kms:GenerateDataKey"], account.arn("kms", "key/*"), _tagged("aws:ResourceTag", stack)),
        allow([f"ecr:{call}" for call in PULL], account.arn("ecr", "repository/*")),
        allow([f"logs:{call}" for call in ("CreateLogGroup", *WRITE_LOGS)], account.arn("logs", "log-group:*")),
        allow(["cloudwatch:PutMetricData", "ec2:Describe*", "ecr:GetAuthorizationToken", *SSM_AGENT], "*"),
    )


def _without_looks(statement: Statement) -> Statement:
    """A boundary names EC2's lists once, in a word: one by one they would not fit."""
    return statement | {"Action": [call for call in statement["Action"] if not call.startswith("ec2:Describe")]}


def network(account: Account, stack: str, shared: tuple[str, ...] = (), bastion: bool = False) -> Document:
    """Network, nodes and their logs; in what another account shares, machines and security groups alone."""
    everything, tagged = account.arn("ec2", "*"), _tagged("aws:ResourceTag", stack)
    rules = account.arn("ec2", "security-group-rule/*")
    groups = [account.arn("ec2", "security-group/*"), rules]
    changes = [*CHANGES, *(["AssociateAddress"] if bastion else [])]
    return document(
        allow([*LOOK], "*"),
        allow([f"ec2:{call}" for call in CREATES], everything),
        allow([f"ec2:{call}" for call in changes], everything, tagged),
        # What a call is about beside what is tagged: a rule before it is one, the interface behind an address.
        allow(["ec2:AuthorizeSecurityGroupEgress", "ec2:AuthorizeSecurityGroupIngress"], rules),
        allow(["ec2:AssociateAddress", "ec2:DisassociateAddress"], account.arn("ec2", "network-interface/*")),
        # Tags by which the statements above know what is the stack's: on what is being made; on rules and a new VPC's default group.
        allow(["ec2:CreateTags"], everything, {"StringLike": {"ec2:CreateAction": "*"}}),
        allow(["ec2:CreateTags"], groups, _UNTAGGED | _tagged("aws:RequestTag", stack)),
        *([allow(["ec2:CreateSecurityGroup", "ec2:RunInstances"], [*shared])] if shared else []),
        allow([f"ec2:{call}" for call in ACCOUNT_DEFAULTS], "*"),
        allow(["ec2:RunInstances"], f"arn:{account.partition}:ec2:{account.region}::image/*"),
        allow(["ssm:GetParameter"], f"arn:{account.partition}:ssm:{account.region}::parameter/aws/service/*"),
        allow([f"logs:{call}" for call in LOG_GROUPS], _log_groups(account, stack)),
    )


def preview(account: Account, stack: str, bounds: str, lustre: bool = False) -> Document:
    """What a preview asks AWS, and what the refresh before it reads; no content of checkpoints or logs."""
    return document(
        allow([*LOOK], "*"),
        allow(["ssm:GetParameter"], f"arn:{account.partition}:ssm:{account.region}::parameter/aws/service/*"),
        allow(["logs:ListTagsForResource"], _log_groups(account, stack)),
        allow([f"s3:{call}" for call in READ_BUCKET], _bucket(account, stack)),
        allow([f"kms:{call}" for call in READ_KEY], account.arn("kms", "key/*"), _tagged("aws:ResourceTag", stack)),
        *([allow([f"fsx:{call}" for call in READ_LUSTRE], account.arn("fsx", "*"))] if lustre else []),
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


def storage(account: Account, stack: str, lustre: bool = False) -> Document:
    """Bucket, key, file system, budget, and Pulumi's state. A key or file system takes its tags as it is made, when it has none."""
    bucket, keys, tagged = _bucket(account, stack), account.arn("kms", "key/*"), _tagged("aws:ResourceTag", stack)
    new = _UNTAGGED | _tagged("aws:RequestTag", stack)
    return document(
        *state(account, stack, writes=True),
        allow([f"s3:{call}" for call in BUCKETS], [bucket, f"{bucket}/*"]),
        allow(["kms:CreateKey"], "*", _tagged("aws:RequestTag", stack)),  # it has no ARN before it is made
        # CreateKey with tags asks for this too: https://docs.aws.amazon.com/kms/latest/APIReference/API_CreateKey.html
        allow(["kms:TagResource"], keys, new),
        allow([f"kms:{call}" for call in (*KEYS, *(LUSTRE_KEYS if lustre else ()))], keys, tagged),
        *(_lustre(account, tagged, new) if lustre else []),
        allow([f"budgets:{call}" for call in (*READ_BUDGET, "ModifyBudget", "TagResource", "UntagResource")], _budget(account, stack)),
    )


def _lustre(account: Account, tagged: dict[str, Any], new: dict[str, Any]) -> list[Statement]:
    systems, roles = account.arn("fsx", "*"), account.iam("role/aws-service-role")
    return [
        allow([f"fsx:{call}" for call in (*LUSTRE_NEW, *READ_LUSTRE)], systems),
        allow(["fsx:TagResource"], systems, new),
        allow([f"fsx:{call}" for call in LUSTRE], systems, tagged),
        # Of an account's first file system: https://docs.aws.amazon.com/fsx/latest/LustreGuide/using-service-linked-roles.html
        allow(
            ["iam:CreateServiceLinkedRole"], f"{roles}/fsx.amazonaws.com/*", {"StringEquals": {"iam:AWSServiceName": "fsx.amazonaws.com"}}
        ),
        # https://docs.aws.amazon.com/fsx/latest/LustreGuide/setting-up.html#fsx-adding-permissions-s3
        allow([f"iam:{call}" for call in LUSTRE_ROLE], f"{roles}/s3.data-source.lustre.fsx.amazonaws.com/*"),
    ]


def identity(account: Account, stack: str, bounds: str, server: bool = False) -> Document:
    """Roles of the stack's own path, none beyond the boundary `bounds` (an ARN); those of the deployment itself it reads and tags."""
    ours, itself = _ours(account, stack), _itself(account, stack, bounds)
    services = [f"{service}.amazonaws.com" for service in ("ec2", "vpc-flow-logs")]
    return document(
        allow([f"iam:{call}" for call in GIVE], ours[0], {"StringEquals": {"iam:PermissionsBoundary": bounds}}),
        allow([f"iam:{call}" for call in (*ROLES, *(POLICIES if server else ()))], ours),
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
        allow(["dlm:GetLifecyclePolicy"], account.arn("dlm", "policy/*")),
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
    """What deploys: its roles and their policies, the provider that it trusts, its boundary."""
    return [*(account.iam(f"{kind}/flotilla-{stack}-*") for kind in ("role", "policy")), account.iam("oidc-provider/*"), bounds]


_UNTAGGED = {"Null": {"aws:ResourceTag/stack": "true"}}  # of no stack, so that none takes what is another's


def _tagged(key: str, stack: str) -> dict[str, dict[str, str]]:
    return {"StringEquals": {f"{key}/stack": stack}}
