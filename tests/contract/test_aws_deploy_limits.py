"""What who deploys to AWS may create, what of others it may not touch, and whether IAM takes the policies that say so."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from typing import Any

import pytest
from support.plans import of

from infra.aws import deploy, policies
from infra.aws.policies import Account

MANAGED = (
    6144  # characters of a managed policy, white space aside: https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_iam-quotas.html
)
INLINE, ATTACHED = 10_240, 10  # characters of all inline policies of a role together, managed policies of a role
ACCOUNT = Account("123456789012", "us-east-2")
OURS, OTHERS, UNTAGGED = {"aws:ResourceTag/stack": "aws-prod"}, {"aws:ResourceTag/stack": "aws-dev"}, {}
NEW = {"aws:RequestTag/stack": "aws-prod"}


def holds(condition: dict[str, Any], values: dict[str, str]) -> bool:
    """Of the operators in our policies."""
    for operator, tests in condition.items():
        for key, given in tests.items():
            wanted, has = [given] if isinstance(given, str) else given, values.get(key)
            if operator == "Null":
                if (has is None) != (wanted == ["true"]):
                    return False
            elif operator in ("StringEquals", "StringLike", "ForAnyValue:StringEquals"):
                if has is None or not any(fnmatchcase(has, one) if operator == "StringLike" else has == one for one in wanted):
                    return False
            else:
                raise AssertionError(operator)
    return True


def may(statements: list[dict[str, Any]], action: str, arn: str, values: dict[str, str]) -> bool:
    def named(given: str | list[str], value: str) -> bool:
        return any(fnmatchcase(value, one) for one in ([given] if isinstance(given, str) else given))

    return any(
        named(one["Action"], action) and named(one["Resource"], arn) and holds(one.get("Condition", {}), values) for one in statements
    )


def deployer(lustre: bool = True, control: bool = False, bastion: bool = False, server: bool = True) -> list[dict[str, Any]]:
    bounds = ACCOUNT.iam("policy/flotilla-aws-prod-boundary")
    documents = [
        deploy.network(ACCOUNT, "aws-prod", bastion=bastion),
        deploy.storage(ACCOUNT, "aws-prod", lustre),
        deploy.identity(ACCOUNT, "aws-prod", bounds, server),
        *([deploy.control(ACCOUNT, "aws-prod")] if control else []),
    ]
    return [statement for document in documents for statement in document["Statement"]]


def ec2(kind: str) -> str:
    return ACCOUNT.arn("ec2", f"{kind}/x-1")


KEY, SYSTEM = ACCOUNT.arn("kms", "key/1"), ACCOUNT.arn("fsx", "file-system/fs-1")
FSX_ROLE = ACCOUNT.iam("role/aws-service-role/fsx.amazonaws.com/AWSServiceRoleForAmazonFSx")


@pytest.mark.parametrize(
    ("call", "arn", "values"),
    [
        ("kms:CreateKey", "*", NEW),
        ("kms:TagResource", KEY, NEW),
        ("kms:CreateGrant", KEY, OURS),
        ("fsx:CreateFileSystem", SYSTEM, NEW),
        ("fsx:TagResource", SYSTEM, NEW),
        ("fsx:CreateDataRepositoryAssociation", SYSTEM, OURS),
        ("iam:CreateServiceLinkedRole", FSX_ROLE, {"iam:AWSServiceName": "fsx.amazonaws.com"}),
        *(("ec2:CreateTags", ec2(kind), NEW | {"ec2:CreateAction": "RunInstances"}) for kind in ("instance", "volume", "vpc", "subnet")),
        *(("ec2:CreateTags", ec2(kind), NEW) for kind in ("security-group", "security-group-rule")),
        ("ec2:CreateVpc", ec2("vpc"), NEW),
        ("ec2:RunInstances", ec2("network-interface"), UNTAGGED),
        ("ec2:RevokeSecurityGroupIngress", ec2("security-group"), UNTAGGED),
        ("ec2:AuthorizeSecurityGroupIngress", ec2("security-group"), OURS),
        ("ec2:AuthorizeSecurityGroupIngress", ec2("security-group-rule"), UNTAGGED),
        ("ec2:CreateRoute", ec2("route-table"), OURS),
        ("ec2:CreateLaunchTemplateVersion", ec2("launch-template"), OURS),
        ("ec2:DisassociateAddress", ec2("network-interface"), UNTAGGED),
        ("ec2:CancelSpotInstanceRequests", ec2("spot-instances-request"), UNTAGGED),
    ],
)
def test_who_deploys_may_make_what_a_stack_has(call, arn, values):
    assert may(deployer(), call, arn, values)


@pytest.mark.parametrize("values", [OTHERS, UNTAGGED, OTHERS | NEW], ids=["of-another-stack", "of-no-stack", "claimed"])
@pytest.mark.parametrize(
    ("call", "arn"),
    [
        *((f"ec2:Delete{what}", ec2("x")) for what in deploy.DELETES),
        *((f"ec2:{call}", ec2("instance")) for call in ("TerminateInstances", "ModifyInstanceAttribute", "ModifyInstanceMetadataOptions")),
        *((f"ec2:{call}", ec2("vpc")) for call in ("ModifyVpcAttribute", "DetachInternetGateway", "AttachInternetGateway")),
        *((f"ec2:{call}", ec2("x")) for call in ("ReleaseAddress", "ReplaceRoute", "ModifySubnetAttribute", "ModifyLaunchTemplate")),
        *((f"ec2:{call}", ec2("security-group")) for call in ("AuthorizeSecurityGroupIngress", "ModifySecurityGroupRules")),
        ("ec2:CreateTags", ec2("instance")),
        *((f"fsx:{call}", SYSTEM) for call in ("DeleteFileSystem", "UpdateFileSystem", "DeleteDataRepositoryAssociation", "UntagResource")),
        *((f"kms:{call}", KEY) for call in ("ScheduleKeyDeletion", "PutKeyPolicy", "CreateGrant", "UntagResource")),
        *((f"ec2:{call}", ec2("x")) for call in ("StopInstances", "DeleteVolume", "DetachVolume")),
    ],
)
def test_who_deploys_touches_nothing_that_is_not_the_stacks(call, arn, values):
    assert may(deployer(control=True), call, arn, OURS)
    assert not may(deployer(control=True), call, arn, values)


@pytest.mark.parametrize(
    ("call", "arn"), [("kms:TagResource", KEY), ("fsx:TagResource", SYSTEM), ("ec2:CreateTags", ec2("security-group"))]
)
def test_nothing_of_another_stack_is_made_the_stacks_own_by_a_tag(call, arn):
    assert not may(deployer(), call, arn, OTHERS | NEW)
    assert not may(deployer(), call, arn, {"aws:RequestTag/stack": "aws-dev"})


@pytest.mark.parametrize(
    ("call", "arn", "needs"),
    [
        *((f"fsx:{call}", SYSTEM, "lustre") for call in ("CreateFileSystem", "DescribeFileSystems", "DeleteFileSystem", "TagResource")),
        *((f"kms:{call}", KEY, "lustre") for call in ("CreateGrant", "PutKeyPolicy")),
        ("iam:CreateServiceLinkedRole", FSX_ROLE, "lustre"),
        ("ec2:AssociateAddress", ec2("instance"), "bastion"),
        *((f"iam:{call}", ACCOUNT.iam("policy/flotilla/aws-prod/x"), "server") for call in ("CreatePolicy", "DeletePolicy")),
        *((call, "*", "nothing") for call in ("ec2:DisableEbsEncryptionByDefault", "ssm:GetParameters", "dlm:ListTagsForResource")),
    ],
)
def test_a_call_is_allowed_to_stacks_that_need_it_alone(call, arn, needs):
    values, without = OURS | NEW | {"iam:AWSServiceName": "fsx.amazonaws.com"}, {"lustre": False, "bastion": False, "server": False}
    assert not may(deployer(**without), call, arn, values)
    if needs == "nothing":
        assert not may(deployer(control=True, bastion=True), call, arn, values)
    elif not call.endswith("TagResource"):
        assert may(deployer(**without | {needs: True}), call, arn, values)


NAMES = ["aws-prod", "team-a-production", "a-name-of-twenty-four-ch", "research-team-production-eu-2-x"]
SHARED = tuple(f"arn:aws-us-gov:ec2:us-gov-west-1:210987654321:{what}-0123456789abcdef0" for what in ("vpc/vpc", *["subnet/subnet"] * 4))


@pytest.mark.parametrize("shared", [(), SHARED], ids=["own-network", "shared-subnets"])
@pytest.mark.parametrize("region", ["us-east-1", "ap-northeast-1", "us-gov-west-1", "cn-northwest-1"])
@pytest.mark.parametrize("name", NAMES)
def test_iam_takes_every_policy_of_the_longest_names(name, region, shared):
    account = Account("123456789012", region)
    bounds = account.iam(f"policy/flotilla-{name}-boundary-1a2b3c4")
    given = policies.checkpoints(policies.bucket_arn(account, "b" * 63), account.arn("kms", f"key/{'1' * 36}"))
    role = account.iam(f"role/flotilla/{name}/flotilla-{name}-node-1a2b3c4")
    profile = role.replace(":role/", ":instance-profile/")
    documents = {
        "boundary": deploy.boundary(account, name, True, given, shared),
        "network": deploy.network(account, name, shared, True),
        "storage": deploy.storage(account, name, True),
        "identity": deploy.identity(account, name, bounds, True),
        "control": deploy.control(account, name),
        "preview": deploy.preview(account, name, bounds, True),
        "preview-control": deploy.look_at_control(account, name),
        "server": policies.dstack_server(account, role, profile, shared),
    }
    sizes = {what: len(json.dumps(document, separators=(",", ":"))) for what, document in documents.items()}
    assert not {what: size for what, size in sizes.items() if size > MANAGED}


@pytest.mark.parametrize("settings", [{}, {"dstack": {"host": "cloud"}, "access.via": "direct"}], ids=["plain", "control-node"])
def test_policies_of_each_role_fit_into_what_it_may_have(settings, changed):
    plan = changed("aws-prod", settings)
    for role in of(plan, "Role"):
        inline = [one.inputs["policy"] for one in of(plan, "RolePolicy") if one.inputs["role"] == role.name]
        attached = [one for one in of(plan, "RolePolicyAttachment") if one.inputs["role"] == role.name]
        assert sum(len(json.dumps(json.loads(text), separators=(",", ":"))) for text in inline) <= INLINE
        assert len(attached) <= ATTACHED
    deploys = {one.name for one in of(plan, "RolePolicyAttachment") if one.inputs["role"] == "flotilla-aws-prod-deploy"}
    assert {f"flotilla-aws-prod-deploy-{what}" for what in ("network", "storage", "identity")} <= deploys


@pytest.mark.parametrize("kind", ["reservation", "block"])
def test_machines_of_a_reservation_that_another_account_shares_may_be_started(kind, changed):
    capacity = {"kind": kind, "id": "cr-0123456789abcdef0"}
    by_dstack = {
        "fleets.0.machine": "p5.48xlarge",
        "fleets.0.capacity": capacity,
        "network.zones": ["us-east-1a"],
        "ci": {"github": "me/mine"},
    }
    theirs = "arn:aws:ec2:us-east-1:210987654321:capacity-reservation/cr-0123456789abcdef"
    plan = changed("aws-dev", by_dstack)
    for name in ("flotilla-aws-dev-deploy-network", "flotilla-aws-dev-dstack-server"):
        [document] = [json.loads(one.inputs["policy"]) for one in of(plan, "Policy") if one.name == name]
        assert may(document["Statement"], "ec2:RunInstances", f"{theirs}0", {})
        assert not may(document["Statement"], "ec2:RunInstances", f"{theirs}1", {})
