"""The control node of a stack on AWS: who reaches it, what it may do, and what outlives it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.aws_api import REGION, api, stack
from support.aws_plans import on_aws, policy
from support.plans import of

from infra.aws.preflight import network as preflight
from infra.preview import Plan
from stacks.host import forward

LABEL = "flotilla-aws-dev-control"


@pytest.fixture(scope="module")
def made(changed: Callable[..., Plan]) -> Plan:
    return changed("aws-dev", {})


def one(plan: Plan, kind: str, name: str = LABEL) -> dict[str, Any]:
    [found] = [resource for resource in of(plan, kind) if resource.name == name]
    return found.inputs


def test_nothing_comes_in_and_there_is_no_public_address(made: Plan) -> None:
    [group] = one(made, "Instance")["vpcSecurityGroupIds"]
    assert not [rule for rule in of(made, "SecurityGroupIngressRule") if rule.inputs["securityGroupId"] == group]
    assert one(made, "Instance")["subnetId"] in made.outputs["cloud"]["private_subnets"].split(",")
    assert not [address for address in of(made, "Eip") if "nat" not in address.name]


def test_its_server_may_do_what_a_dstack_server_may_and_read_one_parameter(made: Plan) -> None:
    attached = one(made, "RolePolicyAttachment", f"{LABEL}-server")
    assert (attached["role"], attached["policyArn"]) == (LABEL, made.outputs["cloud"]["dstack_server_policy"])
    [statement] = policy(made, f"{LABEL}-token")["Statement"]
    assert statement["Action"] == ["ssm:GetParameter"]
    assert statement["Resource"].endswith(":parameter/flotilla/aws-dev/server-token")
    names = {resource.name for resource in of(made, "RolePolicy") if resource.inputs["role"] == LABEL}
    assert names == {f"{LABEL}-ssm", f"{LABEL}-token"}


def test_the_token_is_in_the_parameter_and_in_no_file_or_user_data(made: Plan) -> None:
    parameter = one(made, "Parameter")
    assert (parameter["type"], parameter["value"], made.outputs["server_token"]) == ("SecureString", "[secret]", "[secret]")
    assert not [name for name, text in made.files.items() if "server_token" in text or "[secret]" in text]
    assert ":parameter/flotilla/aws-dev/server-token\n" in one(made, "Instance")["userData"]  # a secret in it would hide all of it


def test_the_disk_is_apart_encrypted_and_backed_up_and_the_old_machine_goes_first(made: Plan) -> None:
    disk, attached = one(made, "Volume"), one(made, "VolumeAttachment")
    assert disk["encrypted"] and disk["availabilityZone"] == "us-east-1a"
    assert attached["stopInstanceBeforeDetaching"]
    replaced = {resource.kind for resource in on_aws(made) if resource.options.get("deleteBeforeReplace")}
    assert replaced == {"Instance", "VolumeAttachment"}
    ignored = {resource.kind: resource.options.get("ignoreChanges") for resource in on_aws(made)}
    assert ignored["Volume"] == ["availabilityZone"] and ignored["Instance"] == ["ami", "subnetId"], "neither moves to another zone"
    backups = one(made, "LifecyclePolicy", f"{LABEL}-backups")["policyDetails"]
    assert backups["targetTags"] == {"Name": disk["tags"]["Name"]}


def test_a_protected_stack_keeps_the_disk(changed: Callable[..., Plan]) -> None:
    plan = changed("aws-dev", {"dstack": {"host": "cloud"}, "protect": True})
    [disk] = of(plan, "Volume")
    assert disk.inputs["finalSnapshot"] and disk.options["protect"] and disk.options["retainOnDelete"]


def test_the_next_steps_forward_the_server_and_log_in(made: Plan) -> None:
    assert made.outputs["next"][:2] == ["flotilla server forward aws-dev", "flotilla server login aws-dev"]
    assert "ssh_config" in made.outputs["rendered"] and made.outputs["cloud"]["control"] in made.files["ssh_config"]


def test_the_forward_finds_the_machine_by_its_name(made: Plan) -> None:
    command = forward.line(stack())
    assert command
    assert f"Name=tag:Name,Values={one(made, 'Instance')['tags']['Name']} " in command
    assert command.endswith('" --document-name AWS-StartPortForwardingSession --parameters portNumber=3000,localPortNumber=3000')


def test_nodes_of_a_fleet_that_pulumi_launches_are_reached_from_within(changed: Callable[..., Plan]) -> None:
    plan = changed("aws-prod", {"dstack": {"host": "cloud"}, "access.via": "direct"})
    assert "proxy_jump" not in plan.files["h100.fleet.dstack.yml"]
    assert "flotilla-aws-prod-control" not in {one.inputs["role"] for one in of(plan, "RolePolicyAttachment")}  # it launches nothing
    [statement] = policy(plan, "flotilla-aws-prod-control-token")["Statement"]
    assert statement["Resource"].endswith(":parameter/flotilla/aws-prod/server-token")


@pytest.mark.parametrize("main", [False, True], ids=["table of its own", "main table"])
def test_preflight_finds_a_subnet_from_which_a_control_node_reaches_nobody(main: bool, ec2: Any) -> None:
    vpc = ec2.create_vpc(CidrBlock="10.1.0.0/16")["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.1.1.0/24", AvailabilityZone=f"{REGION}a")["Subnet"]["SubnetId"]
    of = stack(network={"vpc": vpc, "subnets": [subnet]}, dstack={"host": "cloud"})
    [found] = preflight.way_out(api(of, ec2=ec2))
    assert found.verdict == "failed" and f"{subnet} has no route to the internet" in found.says
    if main:
        table = ec2.describe_route_tables(Filters=[{"Name": "vpc-id", "Values": [vpc]}])["RouteTables"][0]["RouteTableId"]
    else:
        table = ec2.create_route_table(VpcId=vpc)["RouteTable"]["RouteTableId"]
        ec2.associate_route_table(RouteTableId=table, SubnetId=subnet)
    gateway = ec2.create_nat_gateway(SubnetId=subnet, ConnectivityType="private")["NatGateway"]["NatGatewayId"]
    ec2.create_route(RouteTableId=table, DestinationCidrBlock="0.0.0.0/0", NatGatewayId=gateway)
    [found] = preflight.way_out(api(of, ec2=ec2))
    assert (found.verdict, found.says) == ("ok", f"{subnet} reaches the internet through {gateway}")


def test_preflight_asks_nothing_where_the_network_is_new_or_there_is_no_control_node() -> None:
    assert not [*preflight.way_out(api(stack(dstack={"host": "cloud"})))]
    network = {"vpc": "vpc-01234567", "subnets": ["subnet-01234567"]}
    assert not [*preflight.way_out(api(stack(network=network, dstack={"host": "elsewhere"})))]
