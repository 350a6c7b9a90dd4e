"""The network and the policies of aws-dev as dstack meets them: its own code against a simulated EC2 that has what the stack declares."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import boto3
import pytest
import yaml
from dstack._internal.core.backends.aws import compute, resources
from dstack._internal.core.backends.aws.models import AWSConfig
from moto import mock_aws
from moto.iam.access_control import IAMPolicy, PermissionResult

from infra.aws.policies import Account, dstack_server
from infra.preview import Plan, Resource

REGION = "us-east-1"
# How each is made with boto3: the call, where its id is in the answer, and the inputs that it takes, whose names are the same but for case.
CALLS = {
    "Vpc": ("create_vpc", "Vpc.VpcId", "cidrBlock"),
    "Subnet": ("create_subnet", "Subnet.SubnetId", "vpcId cidrBlock availabilityZone"),
    "InternetGateway": ("create_internet_gateway", "InternetGateway.InternetGatewayId", ""),
    "RouteTable": ("create_route_table", "RouteTable.RouteTableId", "vpcId"),
    "Route": ("create_route", "", "routeTableId destinationCidrBlock gatewayId natGatewayId"),
    "RouteTableAssociation": ("associate_route_table", "", "routeTableId subnetId"),
    "Eip": ("allocate_address", "AllocationId", "domain"),
    "NatGateway": ("create_nat_gateway", "NatGateway.NatGatewayId", "subnetId allocationId"),
    "SecurityGroup": ("create_security_group", "GroupId", "vpcId description"),
    "SecurityGroupIngressRule": ("authorize_security_group_ingress", "", ""),
    "SecurityGroupEgressRule": ("authorize_security_group_egress", "", ""),
}


def build(plan: Plan, ec2: Any) -> dict[str, str]:
    """Makes what the plan declares, each after what it refers to; `{id in the plan: id in EC2}`."""
    waiting = [resource for resource in plan.resources if resource.kind in CALLS and not resource.component]
    unmade, made = {resource.id for resource in waiting}, {}
    while waiting:
        ready = [
            resource
            for resource in waiting
            if not unmade & {value for value in resource.inputs.values() if isinstance(value, str)} - {resource.id}
        ]
        assert ready, f"in a circle: {[resource.name for resource in waiting]}"
        for resource in ready:
            made[resource.id] = make(resource, made, ec2)
            unmade.discard(resource.id)
        waiting = [resource for resource in waiting if resource not in ready]
    return made


def make(resource: Resource, made: dict[str, str], ec2: Any) -> str:
    call, where, keys = CALLS[resource.kind]
    inputs = {key: made.get(value, value) if isinstance(value, str) else value for key, value in resource.inputs.items()}
    arguments = {key[0].upper() + key[1:]: inputs[key] for key in keys.split() if key in inputs}
    if resource.kind == "SecurityGroup":
        arguments["GroupName"] = inputs.get("name", resource.name)
    if resource.kind.endswith("Rule"):
        arguments |= {"GroupId": inputs["securityGroupId"], "IpPermissions": [permission(inputs)]}
    answer: Any = getattr(ec2, call)(**arguments)
    for key in where.split("."):
        answer = answer[key] if key else resource.id
    if resource.kind == "InternetGateway":
        ec2.attach_internet_gateway(InternetGatewayId=answer, VpcId=inputs["vpcId"])
    if resource.kind == "SecurityGroup":  # the provider takes away the rule with which EC2 makes every group
        ec2.revoke_security_group_egress(GroupId=answer, IpPermissions=[permission({"ipProtocol": "-1", "cidrIpv4": "0.0.0.0/0"})])
    return answer


def permission(inputs: dict[str, Any]) -> dict[str, Any]:
    rule: dict[str, Any] = {"IpProtocol": inputs["ipProtocol"]}
    rule |= {key[0].upper() + key[1:]: int(inputs[key]) for key in ("fromPort", "toPort") if key in inputs}
    if "cidrIpv4" in inputs:
        return rule | {"IpRanges": [{"CidrIp": inputs["cidrIpv4"]}]}
    return rule | {"UserIdGroupPairs": [{"GroupId": inputs["referencedSecurityGroupId"]}]}


@pytest.fixture
def ec2(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    with mock_aws():
        yield boto3.client("ec2", region_name=REGION)


def config(plan: Plan, made: dict[str, str]) -> AWSConfig:
    """dstack's configuration from the rendered file, with the ids that EC2 gave."""
    text = plan.files["server-config.yml"]
    for planned, real in made.items():
        text = text.replace(planned, real) if re.match(r"^(vpc|subnet)-[0-9a-f]{17}$", planned) else text
    return AWSConfig.model_validate(yaml.safe_load(text)["projects"][0]["backends"][0])


@pytest.mark.parametrize("settings", [{}, {"network.nat": "per-zone"}, {"network.zones": ["us-east-1b"]}], ids=str)
def test_dstack_finds_the_private_subnets_and_no_other(settings, ec2, changed):
    plan = changed("aws-dev", settings)
    made = build(plan, ec2)
    vpc, subnets = compute.get_vpc_id_subnets_ids_or_error(ec2, config(plan, made), REGION, allocate_public_ip=False)
    assert vpc == made[next(resource.id for resource in plan.resources if resource.kind == "Vpc")]
    assert set(subnets) == {made[resource.id] for resource in plan.resources if resource.kind == "Subnet" and "-private-" in resource.name}


def rules(ec2: Any) -> list[tuple[Any, ...]]:
    keys = ("GroupId", "IsEgress", "IpProtocol", "FromPort", "ToPort", "CidrIpv4", "ReferencedGroupInfo")
    found = ec2.describe_security_group_rules()["SecurityGroupRules"]
    return sorted(tuple(str(rule.get(key)) for key in keys) for rule in found)


def test_dstack_takes_the_group_and_its_rules_as_they_are(ec2, planned):
    made = build(planned("aws-dev"), ec2)
    vpc = next(real for plan, real in made.items() if plan.startswith("vpc-"))
    groups, before = ec2.describe_security_groups()["SecurityGroups"], rules(ec2)
    assert resources.create_security_group(ec2, "main", vpc) in made.values()
    assert rules(ec2) == before
    assert len(ec2.describe_security_groups()["SecurityGroups"]) == len(groups)


def test_a_project_of_another_name_has_its_own_group(ec2, changed):
    made = build(changed("aws-dev", {"dstack": {"project": "my-team", "host": "cloud"}}), ec2)
    vpc = next(real for plan, real in made.items() if plan.startswith("vpc-"))
    before = rules(ec2)
    assert resources.create_security_group(ec2, "my-team", vpc) in made.values()
    assert rules(ec2) == before
    assert resources.create_security_group(ec2, "main", vpc) not in made.values()


@pytest.mark.parametrize("missing", ["-ssh", "-self-in", "-self-out"])
def test_dstack_would_add_any_rule_that_was_missing(missing, ec2, planned):
    plan = planned("aws-dev")
    less = replace(plan, resources=[resource for resource in plan.resources if not resource.name.endswith(missing)])
    assert len(less.resources) == len(plan.resources) - 1
    made = build(less, ec2)
    before = rules(ec2)
    resources.create_security_group(ec2, "main", next(real for plan, real in made.items() if plan.startswith("vpc-")))
    assert len(rules(ec2)) == len(before) + 1


# What the server's policy lets dstack do

ACCOUNT = Account("123456789012", REGION)
ROLE, PROFILE = ACCOUNT.iam("role/flotilla/aws-dev/node"), ACCOUNT.iam("instance-profile/flotilla/aws-dev/node")
OWN = {"aws:ResourceTag/owner": "dstack"}
PERMITTED = [
    ("ec2:RunInstances", "instance/i-1", {}),
    ("ec2:RunInstances", "subnet/subnet-1", {}),
    ("ec2:RunInstances", "network-interface/eni-1", {}),
    ("ec2:RunInstances", "volume/vol-1", {}),
    ("ec2:RunInstances", "security-group/sg-1", {}),
    ("ec2:RunInstances", "placement-group/pg", {}),
    ("ec2:RunInstances", "capacity-reservation/cr-1", {}),
    ("ec2:CreateTags", "instance/i-1", {"ec2:CreateAction": "RunInstances"}),
    ("ec2:CreateTags", "volume/vol-1", {"ec2:CreateAction": "CreateVolume"}),
    ("ec2:TerminateInstances", "instance/i-1", OWN),
    ("ec2:CancelSpotInstanceRequests", "spot-instances-request/sir-1", {}),
    ("ec2:CreateVolume", "volume/vol-1", {"aws:RequestTag/owner": "dstack"}),
    ("ec2:AttachVolume", "volume/vol-1", OWN),
    ("ec2:DetachVolume", "instance/i-1", OWN),
    ("ec2:DeleteVolume", "volume/vol-1", OWN),
    ("ec2:CreatePlacementGroup", "placement-group/pg", {}),
    ("ec2:DeletePlacementGroup", "placement-group/pg", {}),
]
SPOT_ROLE = ACCOUNT.iam("role/aws-service-role/spot.amazonaws.com/AWSServiceRoleForEC2Spot")
REFUSED = [
    ("ec2:TerminateInstances", "instance/i-1", {"aws:ResourceTag/owner": "somebody"}),
    ("ec2:DeleteVolume", "volume/vol-1", {"aws:ResourceTag/owner": "somebody"}),
    ("ec2:CreateTags", "instance/i-1", {"ec2:CreateAction": "none"}),
    ("ec2:CreateVolume", "volume/vol-1", {"aws:RequestTag/owner": "somebody"}),
    ("ec2:CreateSecurityGroup", "security-group/sg-1", {}),
    ("ec2:AuthorizeSecurityGroupIngress", "security-group/sg-1", {}),
    ("ec2:DeleteVpc", "vpc/vpc-1", {}),
]


def permitted(action: str, resource: str, values: dict[str, str]) -> bool:
    found = IAMPolicy(json.dumps(dstack_server(ACCOUNT, ROLE, PROFILE))).is_action_permitted(
        action, resource, incoming_condition_values=values
    )
    return found == PermissionResult.PERMITTED


@pytest.mark.parametrize(("action", "resource", "values"), PERMITTED, ids=str)
def test_dstack_may(action, resource, values):
    assert permitted(action, ACCOUNT.arn("ec2", resource), values)
    elsewhere = Account("999999999999", REGION).arn("ec2", resource)
    assert not permitted(action, elsewhere, values)


@pytest.mark.parametrize(("service", "may"), [("spot.amazonaws.com", True), ("autoscaling.amazonaws.com", False)])
def test_dstack_may_make_the_role_of_an_accounts_first_spot_machine(service, may):
    assert permitted("iam:CreateServiceLinkedRole", SPOT_ROLE, {"iam:AWSServiceName": service}) is may


@pytest.mark.parametrize(("action", "resource", "values"), REFUSED, ids=str)
def test_dstack_may_not(action, resource, values):
    assert not permitted(action, ACCOUNT.arn("ec2", resource), values)


def test_dstack_may_give_its_machines_the_nodes_role_alone():
    to_ec2 = {"iam:PassedToService": "ec2.amazonaws.com"}
    assert permitted("iam:PassRole", ROLE, to_ec2)
    assert not permitted("iam:PassRole", ROLE, {"iam:PassedToService": "lambda.amazonaws.com"})
    assert not permitted("iam:PassRole", ACCOUNT.iam("role/admin"), to_ec2)
    assert permitted("iam:GetInstanceProfile", PROFILE, {})
    assert permitted("ec2:RunInstances", f"arn:aws:ec2:{REGION}::image/ami-1", {})


# Of dstack's calls those that this network spares it: its group is there, and nothing has a public address or is a gateway.
SPARED = {
    *("AllocateAddress", "AssociateAddress", "DescribeAddresses", "DisassociateAddress", "ReleaseAddress"),
    *("AuthorizeSecurityGroupEgress", "AuthorizeSecurityGroupIngress", "CreateSecurityGroup"),
}


def test_every_call_that_dstack_makes_of_ec2_is_in_the_policy_or_spared(ec2):
    source = inspect.getsource(compute) + inspect.getsource(resources)
    methods = set(re.findall(r"ec2_client\.(\w+)\(", source)) & ec2.meta.method_to_api_mapping.keys()
    calls = {ec2.meta.method_to_api_mapping[method] for method in methods} | {"RunInstances", "CreateTags"}
    assert len(calls) > 20
    named = {action for statement in dstack_server(ACCOUNT, ROLE, PROFILE)["Statement"] for action in statement["Action"]}
    assert {f"ec2:{call}" for call in calls - SPARED} <= named
    assert calls >= SPARED


CONTROL = {"dstack": {"host": "cloud"}, "ci": {"github": "example/flotilla"}}  # the most that a role of aws-dev may be given


@pytest.mark.parametrize(("stack", "more"), [("aws-dev", {}), ("aws-prod", {}), ("aws-dev", CONTROL)])
def test_iam_takes_every_policy(stack, more, ec2, changed):
    iam = boto3.client("iam", region_name=REGION)
    iam.create_role(RoleName="any", AssumeRolePolicyDocument=json.dumps({"Version": "2012-10-17", "Statement": []}))
    inline: dict[str, int] = {}
    for resource in changed(stack, more).resources:
        if resource.type == "aws:iam/role:Role":
            iam.create_role(RoleName=resource.name, AssumeRolePolicyDocument=resource.inputs["assumeRolePolicy"])
        if resource.type == "aws:iam/policy:Policy":
            iam.create_policy(PolicyName=resource.name, PolicyDocument=resource.inputs["policy"])
            assert len(resource.inputs["policy"].replace(" ", "")) <= 6144, resource.name
        if resource.type == "aws:iam/rolePolicy:RolePolicy":
            iam.put_role_policy(RoleName="any", PolicyName=resource.name, PolicyDocument=resource.inputs["policy"])
            role = resource.inputs["role"]
            inline[role] = inline.get(role, 0) + len(resource.inputs["policy"].replace(" ", ""))
    assert inline and max(inline.values()) <= 10240, inline


# Calls that name no resource, by the references in infra/aws/policies.py; those of kms and dlm that create have a tag's condition.
UNNARROWED = re.compile(
    r"(ec2:(Describe\w*\*?|Get\w+Default\w*|(En|Dis)ableEbsEncryptionByDefault|ModifyInstanceMetadataDefaults)|ecr:GetAuthorizationToken"
    r"|cloudwatch:PutMetricData|servicequotas:\w+|ssm:UpdateInstanceInformation|ssmmessages:\w+|logs:DescribeLogGroups|kms:CreateKey"
    r"|cloudwatch:DescribeAlarms|dlm:(CreateLifecyclePolicy|GetLifecyclePolicies)|ssm:DescribeParameters)"
)


@pytest.mark.parametrize(("stack", "more"), [("aws-dev", {}), ("aws-prod", {}), ("aws-dev", CONTROL)])
def test_no_statement_is_for_all_resources_where_one_could_be_named(stack, more, changed):
    documents = [
        resource.inputs["policy"]
        for resource in changed(stack, more).resources
        if resource.type in ("aws:iam/policy:Policy", "aws:iam/rolePolicy:RolePolicy")
    ]
    assert len(documents) >= 3
    for statement in [statement for text in documents for statement in json.loads(text)["Statement"]]:
        assert "*" not in statement["Action"]
        if "*" in ([statement["Resource"]] if isinstance(statement["Resource"], str) else statement["Resource"]):
            assert all(UNNARROWED.fullmatch(action) for action in statement["Action"]), statement
