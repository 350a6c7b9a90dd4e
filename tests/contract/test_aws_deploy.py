"""Who may deploy to AWS from GitHub, and what a deployment may make."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from moto.iam.access_control import IAMPolicyStatement, PermissionResult
from support.aws_plans import on_aws, policy
from support.plans import of

from infra.aws.policies import Account
from infra.preview import Plan, Resource


@pytest.mark.parametrize(("role", "subjects"), [("deploy", ["environment:prod"]), ("preview", ["pull_request", "ref:refs/heads/main"])])
def test_one_environment_of_one_repository_may_deploy_and_its_pull_requests_may_preview(role, subjects, planned):
    [found] = [resource for resource in of(planned("aws-prod"), "Role") if resource.name.endswith(f"-{role}")]
    [statement] = json.loads(found.inputs["assumeRolePolicy"])["Statement"]
    assert statement["Condition"] == {
        "StringEquals": {
            "token.actions.githubusercontent.com:aud": "sts.amazonaws.com",
            "token.actions.githubusercontent.com:sub": [f"repo:example/flotilla:{subject}" for subject in subjects],
        }
    }
    assert planned("aws-prod").outputs["cloud"][f"{role}_role"] == f"arn:aws:iam::123456789012:role/{found.name}"


def test_a_preview_only_looks(planned):
    actions = [
        action for statement in policy(planned("aws-prod"), "flotilla-aws-prod-preview")["Statement"] for action in statement["Action"]
    ]
    assert all(re.fullmatch(r"\w+:(Decrypt|Describe|Get|List|View)[\w*]*", action) for action in actions)
    content = {"s3:GetObject", "logs:GetLogEvents", "ec2:GetConsoleOutput", "ssm:GetParametersByPath"}
    roles = documents(planned("aws-prod"), "preview")
    assert not {action for action in content if permitted(roles, action, "arn:aws:s3:::flotilla-aws-prod-1a2b/x")}


# What the provider calls for a resource of a kind: to refresh it; to change its tags and what else it changes in place. Compared with the
# functions that read, update and delete in the source of terraform-provider-aws (internal/service/, versions 4 to 6) for Bucket,
# DataRepositoryAssociation, Instance, LifecyclePolicy, LustreFileSystem, Role and RouteTableAssociation; the others are not compared yet.
EC2_TAGS = "ec2:CreateTags ec2:DeleteTags"
BUCKET_PARTS = {
    "BucketLifecycleConfiguration": "LifecycleConfiguration",
    "BucketOwnershipControls": "BucketOwnershipControls",
    "BucketPolicy": "BucketPolicy",
    "BucketPublicAccessBlock": "BucketPublicAccessBlock",
    "BucketServerSideEncryptionConfiguration": "EncryptionConfiguration",
    "BucketVersioning": "BucketVersioning",
}
CALLS = {
    "Bucket": (
        "s3:ListBucket s3:GetAccelerateConfiguration s3:GetBucketAcl s3:GetBucketCORS s3:GetBucketLocation s3:GetBucketLogging "
        "s3:GetBucketObjectLockConfiguration s3:GetBucketPolicy s3:GetBucketRequestPayment s3:GetBucketTagging s3:GetBucketVersioning "
        "s3:GetBucketWebsite s3:GetEncryptionConfiguration s3:GetLifecycleConfiguration s3:GetReplicationConfiguration",
        "s3:PutBucketTagging",
    ),
    **{kind: (f"s3:Get{part}", f"s3:Put{part}") for kind, part in BUCKET_PARTS.items()},
    "Budget": ("budgets:ViewBudget budgets:ListTagsForResource", "budgets:ModifyBudget budgets:TagResource budgets:UntagResource"),
    "LifecyclePolicy": ("dlm:GetLifecyclePolicy", "dlm:UpdateLifecyclePolicy dlm:TagResource dlm:UntagResource"),
    "MetricAlarm": (
        "cloudwatch:DescribeAlarms cloudwatch:ListTagsForResource",
        "cloudwatch:PutMetricAlarm cloudwatch:TagResource cloudwatch:UntagResource",
    ),
    "Parameter": (
        "ssm:GetParameter ssm:DescribeParameters ssm:ListTagsForResource",
        "ssm:PutParameter ssm:AddTagsToResource ssm:RemoveTagsFromResource",
    ),
    "Volume": ("ec2:DescribeVolumes", f"{EC2_TAGS} ec2:ModifyVolume"),
    "VolumeAttachment": ("ec2:DescribeVolumes ec2:DescribeInstances", "ec2:StopInstances ec2:AttachVolume ec2:DetachVolume"),
    "DataRepositoryAssociation": (
        "fsx:DescribeDataRepositoryAssociations fsx:ListTagsForResource",
        "fsx:UpdateDataRepositoryAssociation fsx:TagResource fsx:UntagResource",
    ),
    "DefaultSecurityGroup": ("ec2:DescribeSecurityGroups", EC2_TAGS),
    "EncryptionByDefault": ("ec2:GetEbsEncryptionByDefault", "ec2:EnableEbsEncryptionByDefault"),
    "Eip": ("ec2:DescribeAddresses ec2:DescribeAddressesAttribute", EC2_TAGS),
    "FlowLog": ("ec2:DescribeFlowLogs", EC2_TAGS),
    "Instance": (
        "ec2:DescribeInstances ec2:DescribeInstanceAttribute ec2:DescribeInstanceTypes ec2:DescribeVolumes ec2:DescribeLaunchTemplates "
        "ec2:DescribeTags ec2:DescribeVpcs ec2:DescribeInstanceCreditSpecifications",
        f"{EC2_TAGS} ec2:ModifyInstanceAttribute ec2:ModifyInstanceMetadataOptions",
    ),
    "InstanceMetadataDefaults": ("ec2:GetInstanceMetadataDefaults", "ec2:ModifyInstanceMetadataDefaults"),
    "InstanceProfile": ("iam:GetInstanceProfile", "iam:TagInstanceProfile iam:UntagInstanceProfile"),
    "InternetGateway": ("ec2:DescribeInternetGateways", EC2_TAGS),
    "Key": (
        "kms:DescribeKey kms:GetKeyPolicy kms:GetKeyRotationStatus kms:ListResourceTags",
        "kms:TagResource kms:UntagResource kms:PutKeyPolicy kms:UpdateKeyDescription kms:EnableKeyRotation",
    ),
    "KeyPair": ("ec2:DescribeKeyPairs", EC2_TAGS),
    "KeyPolicy": ("kms:GetKeyPolicy", "kms:PutKeyPolicy"),
    "LaunchTemplate": (
        "ec2:DescribeLaunchTemplates ec2:DescribeLaunchTemplateVersions",
        f"{EC2_TAGS} ec2:CreateLaunchTemplateVersion ec2:ModifyLaunchTemplate",
    ),
    "LogGroup": (
        "logs:DescribeLogGroups logs:ListTagsForResource",
        "logs:PutRetentionPolicy logs:TagResource logs:UntagResource",
    ),
    "LustreFileSystem": (
        "fsx:DescribeFileSystems fsx:ListTagsForResource",
        "fsx:UpdateFileSystem fsx:TagResource fsx:UntagResource",
    ),
    "NatGateway": ("ec2:DescribeNatGateways", EC2_TAGS),
    "OpenIdConnectProvider": ("iam:GetOpenIDConnectProvider", "iam:TagOpenIDConnectProvider iam:UntagOpenIDConnectProvider"),
    "PlacementGroup": ("ec2:DescribePlacementGroups", EC2_TAGS),
    "Policy": ("iam:GetPolicy iam:GetPolicyVersion iam:ListPolicyVersions iam:ListPolicyTags", "iam:TagPolicy iam:UntagPolicy"),
    "Role": (
        "iam:GetRole iam:ListRolePolicies iam:GetRolePolicy iam:ListAttachedRolePolicies iam:ListRoleTags",
        "iam:TagRole iam:UntagRole",
    ),
    "RolePolicy": ("iam:GetRolePolicy", ""),
    "RolePolicyAttachment": ("iam:ListAttachedRolePolicies", ""),
    "Route": ("ec2:DescribeRouteTables", "ec2:ReplaceRoute"),
    "RouteTable": ("ec2:DescribeRouteTables", EC2_TAGS),
    "RouteTableAssociation": ("ec2:DescribeRouteTables", "ec2:ReplaceRouteTableAssociation"),
    "SecurityGroup": ("ec2:DescribeSecurityGroups ec2:DescribeNetworkInterfaces", EC2_TAGS),
    "SecurityGroupEgressRule": ("ec2:DescribeSecurityGroupRules", f"{EC2_TAGS} ec2:ModifySecurityGroupRules"),
    "SecurityGroupIngressRule": ("ec2:DescribeSecurityGroupRules", f"{EC2_TAGS} ec2:ModifySecurityGroupRules"),
    "Subnet": ("ec2:DescribeSubnets", f"{EC2_TAGS} ec2:ModifySubnetAttribute"),
    "Vpc": (
        "ec2:DescribeVpcs ec2:DescribeVpcAttribute ec2:DescribeNetworkAcls ec2:DescribeRouteTables ec2:DescribeSecurityGroups",
        f"{EC2_TAGS} ec2:ModifyVpcAttribute",
    ),
    "VpcEndpoint": ("ec2:DescribeVpcEndpoints ec2:DescribePrefixLists", f"{EC2_TAGS} ec2:ModifyVpcEndpoint"),
}
# What it calls to delete one; what is not here it forgets, or takes back by the calls that change it.
DELETES = {
    **{kind: f"ec2:Delete{kind}" for kind in ("InternetGateway", "LaunchTemplate", "NatGateway", "PlacementGroup", "Subnet", "Vpc")},
    **{kind: f"ec2:Delete{kind}" for kind in ("KeyPair", "Route", "RouteTable", "SecurityGroup", "Volume")},
    "Bucket": "s3:DeleteBucket s3:ListBucketVersions s3:DeleteObject s3:DeleteObjectVersion",
    "BucketPolicy": "s3:DeleteBucketPolicy",
    "Budget": "budgets:ModifyBudget",
    "DataRepositoryAssociation": "fsx:DeleteDataRepositoryAssociation",
    "Eip": "ec2:DisassociateAddress ec2:ReleaseAddress",
    "FlowLog": "ec2:DeleteFlowLogs",
    "Instance": "ec2:ModifyInstanceAttribute ec2:TerminateInstances",
    "InstanceProfile": "iam:RemoveRoleFromInstanceProfile iam:DeleteInstanceProfile",
    "Key": "kms:ScheduleKeyDeletion",
    "LifecyclePolicy": "dlm:DeleteLifecyclePolicy",
    "LogGroup": "logs:DeleteLogGroup",
    "LustreFileSystem": "fsx:DeleteFileSystem",
    "MetricAlarm": "cloudwatch:DeleteAlarms",
    "Parameter": "ssm:DeleteParameter",
    "Role": "iam:ListInstanceProfilesForRole iam:DeleteRole",
    "RolePolicy": "iam:DeleteRolePolicy",
    "RouteTableAssociation": "ec2:DisassociateRouteTable",
    "SecurityGroupEgressRule": "ec2:RevokeSecurityGroupEgress",
    "SecurityGroupIngressRule": "ec2:RevokeSecurityGroupIngress",
    "VolumeAttachment": "ec2:StopInstances ec2:DetachVolume",
    "VpcEndpoint": "ec2:DeleteVpcEndpoints",
}
CONTROL = {"MetricAlarm", "LifecyclePolicy", "Parameter", "Volume", "VolumeAttachment"}  # of a control node alone
NO_RESOURCE = {"cloudwatch:DescribeAlarms", "ssm:DescribeParameters"}  # these take `*` alone
NO_RESOURCE |= {"logs:DescribeLogGroups", "ec2:EnableEbsEncryptionByDefault", "ec2:ModifyInstanceMetadataDefaults"}
ACCOUNT = Account("123456789012", "us-east-2")
TAGS = {"aws:ResourceTag/stack": "aws-prod"}


def documents(plan: Plan, role: str) -> list[dict[str, Any]]:
    """The statements of a role's policies; none denies."""
    found = [resource for resource in of(plan, "Policy") if resource.name.startswith(f"flotilla-aws-prod-{role}")]
    statements = [statement for resource in found for statement in json.loads(resource.inputs["policy"])["Statement"]]
    assert {statement["Effect"] for statement in statements} == {"Allow"}
    return statements


def permitted(statements: list[dict[str, Any]], action: str, arn: str, values: dict[str, str] = TAGS) -> bool:
    if action in NO_RESOURCE or re.fullmatch("ec2:(Describe|Get).*", action):
        arn = "*"
    return any(
        IAMPolicyStatement(statement).is_action_permitted(action, arn, incoming_condition_values=values) == PermissionResult.PERMITTED
        for statement in statements
    )


ARNS = {  # by service
    "budgets": f"arn:aws:budgets::{ACCOUNT.id}:budget/{{name}}",
    "cloudwatch": ACCOUNT.arn("logs", "log-group:{name}"),
    "dlm": ACCOUNT.arn("dlm", "policy/policy-1a2b3c4"),
    "ssm": ACCOUNT.arn("ssm", "parameter/flotilla/aws-prod/server-token"),
    "fsx": ACCOUNT.arn("fsx", "file-system/fs-1a2b3c4"),
    "kms": ACCOUNT.arn("kms", "key/1a2b3c4d-0000-0000-0000-000000000000"),
    "s3": "arn:aws:s3:::{name}",
}


def arn_of(resource: Resource) -> str:
    """As AWS has it, with the ending that Pulumi gives to names."""
    service, path = resource.type.partition(":")[2].partition("/")[0], resource.inputs.get("path", "/")
    kind, name = resource.kind.lower(), f"{resource.name}-1a2b3c4"
    if resource.kind == "OpenIdConnectProvider":
        kind, name = "oidc-provider", "token.actions.githubusercontent.com"
    elif resource.kind == "InstanceProfile":
        kind = "instance-profile"
    elif resource.kind == "MetricAlarm":
        return ACCOUNT.arn("cloudwatch", f"alarm:{name}")
    elif resource.kind in ("RolePolicy", "RolePolicyAttachment"):
        kind, name = "role", resource.inputs["role"]
        path = "/" if name.endswith(("-deploy", "-preview")) else "/flotilla/aws-prod/"
    elif resource.name.endswith("-boundary"):
        name = resource.name  # its ARN in the plan, which the policies name
    return ACCOUNT.iam(f"{kind}{path}{name}") if service == "iam" else ARNS.get(service, ACCOUNT.arn("ec2", "x/{name}")).format(name=name)


@pytest.mark.parametrize("control", [False, True])
def test_who_looks_for_drift_may_read_and_who_deploys_may_change_and_delete_everything_of_the_stack(control, changed):
    beside = {"dstack": {"host": "cloud"}, "access.via": "direct"} if control else {}
    plan = changed("aws-prod", beside | {"fleets.0.placement": "cluster"})
    looks, deploys = documents(plan, "preview"), documents(plan, "deploy")
    resources = on_aws(plan)
    assert {resource.kind for resource in resources} == (CALLS.keys() if control else CALLS.keys() - CONTROL)
    refused = []
    for resource in resources:
        reads, changes = (calls.split() for calls in CALLS[resource.kind])
        arn = arn_of(resource)
        refused += [("preview", call, arn) for call in reads if not permitted(looks, call, arn)]
        own = ":iam::" not in arn or "/flotilla/aws-prod/" in arn  # other roles are made and deleted by a person
        ends = DELETES.get(resource.kind, "").split() if own else []
        refused += [("deploy", call, arn) for call in [*reads, *changes, *ends] if not permitted(deploys, call, arn)]
    assert not refused


@pytest.mark.parametrize(("service", "may"), [("spot.amazonaws.com", True), ("autoscaling.amazonaws.com", False)])
def test_who_deploys_may_make_the_role_of_an_accounts_first_spot_machine_and_no_other(service, may, planned):
    role = ACCOUNT.iam("role/aws-service-role/spot.amazonaws.com/AWSServiceRoleForEC2Spot")
    statements = documents(planned("aws-prod"), "deploy")
    assert permitted(statements, "iam:CreateServiceLinkedRole", role, {"iam:AWSServiceName": service}) is may


def test_nobody_deploys_or_looks_into_another_stack(planned):
    others = [
        ("s3:GetBucketPolicy", "arn:aws:s3:::flotilla-gcp-1a2b"),
        ("iam:TagRole", ACCOUNT.iam("role/admin")),
        ("iam:GetRole", ACCOUNT.iam("role/flotilla/other/flotilla-other-node")),
        ("logs:UntagResource", ACCOUNT.arn("logs", "log-group:flotilla-other-flow")),
    ]
    for role in ("preview", "deploy"):
        statements = documents(planned("aws-prod"), role)
        assert not [call for call, arn in others if permitted(statements, call, arn)], role


@pytest.mark.parametrize(
    ("call", "arn"),
    [
        ("ec2:DeleteVolume", "arn:aws:ec2:us-east-2:123456789012:volume/vol-0abc"),
        ("ec2:DetachVolume", "arn:aws:ec2:us-east-2:123456789012:volume/vol-0abc"),
        ("ec2:StopInstances", "arn:aws:ec2:us-east-2:123456789012:instance/i-0abc"),
        ("dlm:DeleteLifecyclePolicy", "arn:aws:dlm:us-east-2:123456789012:policy/policy-0abc"),
    ],
)
def test_disks_machines_and_schedules_of_others_are_out_of_reach(call, arn, changed):
    deploys = documents(changed("aws-prod", {"dstack": {"host": "cloud"}, "access.via": "direct"}), "deploy")
    assert permitted(deploys, call, arn)
    assert not permitted(deploys, call, arn, {"aws:ResourceTag/stack": "aws-dev"})


def test_a_provider_that_is_there_is_not_made_again(changed):
    mine = "arn:aws:iam::123456789012:oidc-provider/token.actions.githubusercontent.com"
    plan = changed("aws-prod", {"ci.provider": mine})
    assert not of(plan, "OpenIdConnectProvider")
    role = next(resource for resource in of(plan, "Role") if resource.name.endswith("-deploy"))
    assert json.loads(role.inputs["assumeRolePolicy"])["Statement"][0]["Principal"] == {"Federated": mine}


def test_what_a_deployment_makes_is_bounded(planned):
    plan = planned("aws-prod")
    bounds = [resource for resource in of(plan, "Policy") if resource.name.endswith("-boundary")]
    made = [resource for resource in of(plan, "Role") if not resource.name.endswith(("-deploy", "-preview"))]
    assert {role.inputs["permissionsBoundary"] for role in made} == {f"arn:aws:iam::123456789012:policy/{bounds[0].name}"}
    assert {role.inputs["path"] for role in made} == {"/flotilla/aws-prod/"}


def test_a_deployment_may_end_what_each_way_to_buy_machines_starts(planned):
    """The provider cancels the request of a spot machine that it destroys."""
    actions = {
        action
        for statement in policy(planned("aws-prod"), "flotilla-aws-prod-deploy-network")["Statement"]
        for action in statement["Action"]
    }
    assert {"ec2:RunInstances", "ec2:TerminateInstances", "ec2:CancelSpotInstanceRequests"} <= actions


STATE = f"arn:aws:s3:::flotilla-state-{ACCOUNT.id}-{ACCOUNT.region}"
STATE_KEY = {"kms:ResourceAliases": "alias/flotilla-state"}


@pytest.mark.parametrize("role", ["preview", "deploy"])
def test_pulumis_state_of_this_stack_alone_is_read_and_written_by_who_deploys(role, planned):
    """The paths are those that the engine's own backend of files has, and a preview on a read-only copy of it ends well."""
    statements = documents(planned("aws-prod"), role)
    own = [
        *("stacks/flotilla/aws-prod.json", "stacks/flotilla/aws-prod.json.bak", "history/flotilla/aws-prod/aws-prod-1.history.json"),
        *("backups/flotilla/aws-prod/aws-prod.1.json", "locks/organization/flotilla/aws-prod/0a1b.json", "meta.yaml"),
    ]
    others = ["stacks/flotilla/aws-dev.json", "history/flotilla/aws-production/x.json", "stacks/flotilla/aws-production.json"]
    assert permitted(statements, "s3:ListBucket", STATE)
    assert all(permitted(statements, "s3:GetObject", f"{STATE}/.pulumi/{path}") for path in own)
    for call in ("s3:PutObject", "s3:DeleteObject"):
        assert {permitted(statements, call, f"{STATE}/.pulumi/{path}") for path in own} == {role == "deploy"}
    for call in ("s3:GetObject", "s3:PutObject", "s3:DeleteObject"):
        assert not any(permitted(statements, call, f"{STATE}/.pulumi/{path}") for path in others)
    [secrets] = [statement for statement in statements if "kms:ResourceAliases" in json.dumps(statement.get("Condition", {}))]
    assert secrets["Condition"] == {"ForAnyValue:StringEquals": STATE_KEY}
    assert set(secrets["Action"]) == {"kms:Decrypt", *(("kms:Encrypt", "kms:GenerateDataKey") if role == "deploy" else ())}


def test_who_deploys_reaches_the_port_of_the_control_node_and_no_shell_or_other_machine(changed):
    plan = changed("aws-prod", {"dstack": {"host": "cloud"}, "access.via": "direct"})
    node = next(resource.inputs["tags"] for resource in of(plan, "Instance") if resource.name == "flotilla-aws-prod-control")
    assert node["Name"] == "flotilla-aws-prod-control"  # beside it the provider's tags, the stack's name among them
    there = {"ssm:resourceTag/Name": node["Name"], "ssm:resourceTag/stack": "aws-prod"}
    machine, document = ACCOUNT.arn("ec2", "instance/i-0abc"), "arn:aws:ssm:us-east-2::document/AWS-StartPortForwardingSession"
    deploys = documents(plan, "deploy")

    def may(arn: str, values: dict[str, str]) -> bool:
        return permitted(deploys, "ssm:StartSession", arn, values)

    assert may(machine, there) and may(document, {})
    assert not may(machine, there | {"ssm:resourceTag/Name": "flotilla-aws-prod-h100"})
    assert not may(machine, there | {"ssm:resourceTag/stack": "aws-dev"})
    # A shell is a session by another document, or by none where nothing asks for one; moto's judge does not know BoolIfExists.
    assert not may("arn:aws:ssm:us-east-2::document/SSM-SessionManagerRunShell", {})
    [on_machine] = [one for one in deploys if "ssm:StartSession" in one["Action"] and "instance/" in one["Resource"]]
    assert on_machine["Condition"]["BoolIfExists"] == {"ssm:SessionDocumentAccessCheck": "true"}
    assert not permitted(documents(plan, "preview"), "ssm:StartSession", machine, there)
    assert not permitted(documents(changed("aws-prod", {}), "deploy"), "ssm:StartSession", machine, there)
