"""The network on AWS: subnets, gateways, routes, flow logs, or an existing one."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pulumi
import pytest
from support import aws_api
from support.aws_plans import BY_PULUMI, on_aws, policy, template
from support.plans import backend, of

from infra.aws import network, preview_answers
from infra.aws.policies import Account
from stacks.load import StackError

ACCOUNT = Account("123456789012", "us-east-1")


def test_nodes_have_a_private_subnet_in_each_zone_behind_one_gateway(planned):
    plan = planned("aws-dev")
    subnets = {resource.name: resource.inputs for resource in of(plan, "Subnet")}
    assert {
        name.removeprefix("flotilla-aws-dev-"): (subnet["availabilityZone"], subnet["cidrBlock"]) for name, subnet in subnets.items()
    } == {
        "private-us-east-1a": ("us-east-1a", "10.65.0.0/20"),
        "private-us-east-1b": ("us-east-1b", "10.65.16.0/20"),
        "private-us-east-1c": ("us-east-1c", "10.65.32.0/20"),
        "public-us-east-1a": ("us-east-1a", "10.65.128.0/20"),
        "public-us-east-1b": ("us-east-1b", "10.65.144.0/20"),
        "public-us-east-1c": ("us-east-1c", "10.65.160.0/20"),
    }
    assert not any(subnet["mapPublicIpOnLaunch"] for subnet in subnets.values())
    routes = {resource.inputs["routeTableId"]: resource.inputs for resource in of(plan, "Route")}
    tables = {resource.inputs["subnetId"]: resource.inputs["routeTableId"] for resource in of(plan, "RouteTableAssociation")}
    way_out = {resource.name: routes[tables[resource.id]] for resource in of(plan, "Subnet")}
    assert all(route["destinationCidrBlock"] == "0.0.0.0/0" for route in way_out.values())
    gateways = {name: str(route.get("natGatewayId") or route.get("gatewayId")).partition("-")[0] for name, route in way_out.items()}
    assert gateways == {name: "nat" if "private" in name else "igw" for name in subnets}


def test_a_gateway_in_each_zone_serves_its_own_zone(changed):
    plan = changed("aws-dev", {"network.nat": "per-zone"})
    zones = {resource.id: resource.inputs["availabilityZone"] for resource in of(plan, "Subnet")}
    gateways = {resource.id: zones[resource.inputs["subnetId"]] for resource in of(plan, "NatGateway")}
    tables = {
        resource.inputs["routeTableId"]: gateways[resource.inputs["natGatewayId"]]
        for resource in of(plan, "Route")
        if "natGatewayId" in resource.inputs
    }
    private = [resource.inputs for resource in of(plan, "RouteTableAssociation") if resource.inputs["routeTableId"] in tables]
    assert sorted(gateways.values()) == ["us-east-1a", "us-east-1b", "us-east-1c"]
    assert [zones[association["subnetId"]] for association in private] == [tables[association["routeTableId"]] for association in private]
    assert len(private) == 3
    [endpoint] = of(plan, "VpcEndpoint")
    assert set(endpoint.inputs["routeTableIds"]) == set(tables)  # S3 without NAT from every private subnet


def test_a_gateway_has_the_way_to_the_internet_for_as_long_as_it_stands(planned):
    [gateway] = of(planned("aws-dev"), "NatGateway")
    names = [urn.rpartition("::")[2] for urn in gateway.options["dependencies"]]
    kinds = [urn.rpartition("::")[0].rpartition(":")[2] for urn in gateway.options["dependencies"]]
    assert ("Route", "flotilla-aws-dev-public") in zip(kinds, names, strict=True)


def test_a_zone_that_goes_moves_no_subnet_of_the_others(planned, changed):
    before = {resource.name: resource.inputs["cidrBlock"] for resource in of(planned("aws-dev"), "Subnet")}
    after = {
        resource.name: resource.inputs["cidrBlock"] for resource in of(changed("aws-dev", {"network.zones": ["us-east-1c"]}), "Subnet")
    }
    assert len(after) == 2
    assert after.items() <= before.items()


def test_flow_logs_are_written_by_a_role_that_may_do_nothing_else(planned):
    plan = planned("aws-prod")
    [log], [group] = of(plan, "FlowLog"), [each for each in of(plan, "LogGroup") if each.name.endswith("-flow")]
    assert (log.inputs["trafficType"], log.inputs["vpcId"]) == ("ALL", of(plan, "Vpc")[0].id)
    assert group.inputs["retentionInDays"] == 30
    [statement] = policy(plan, "flotilla-aws-prod-flow")["Statement"]
    assert all(resource.startswith("arn:aws:logs:") for resource in statement["Resource"])
    assert not of(planned("aws-dev"), "FlowLog")


def test_an_existing_network_is_used_and_none_is_made(changed):
    mine = {"vpc": "vpc-0123456789abcdef0", "subnets": ["subnet-0123456789abcdef0"]}
    plan = changed("aws-dev", {"network": mine})
    assert not {resource.kind for resource in on_aws(plan)} & {
        "Vpc",
        "Subnet",
        "NatGateway",
        "InternetGateway",
        "RouteTable",
        "VpcEndpoint",
    }
    assert of(plan, "SecurityGroup")[0].inputs["vpcId"] == mine["vpc"]
    assert backend(plan)["vpc_ids"] == {"us-east-1": mine["vpc"]}


def test_nodes_stand_in_the_first_subnet_that_the_stack_lists(changed):
    mine = {"vpc": "vpc-0123456789abcdef0", "subnets": ["subnet-0123456789abcdef0", "subnet-0123456789abcdef1"]}
    access = {key: value for key, value in BY_PULUMI["access"].items() if key != "allow"} | {"via": "tunnel"}
    plan = changed("aws-dev", BY_PULUMI | {"network": mine, "access": access})
    assert {card["subnetId"] for card in template(plan)["networkInterfaces"]} == {mine["subnets"][0]}


@pytest.mark.parametrize("region", ["us-east-1", "us-west-2", "eu-west-1"])
def test_an_existing_network_is_used_in_every_region(region, changed):
    mine = {"vpc": "vpc-0123456789abcdef0", "subnets": ["subnet-0123456789abcdef0"]}
    plan = changed("aws-dev", {"network": mine, "region": region})
    assert f"getSubnet {json.dumps({'id': mine['subnets'][0], 'region': region, 'vpcId': mine['vpc']})}" in " ".join(plan.assumed)
    assert backend(plan)["vpc_ids"] == {region: mine["vpc"]}


def test_one_subnet_where_the_machine_is_not_offered_is_refused_as_a_zone_would_be(monkeypatch):
    zones = {"subnet-0123456789abcdef0": "us-east-1a", "subnet-0123456789abcdef1": "us-east-1e"}
    mine = {"owner_id": ACCOUNT.id, "arn": ""}
    monkeypatch.setattr(network.ec2, "get_subnet", lambda id, **_: SimpleNamespace(availability_zone=zones[id], **mine))
    monkeypatch.setattr(network.ec2, "get_vpc", lambda **_: SimpleNamespace(cidr_block="10.0.0.0/16", **mine))
    stack = aws_api.stack(network={"vpc": "vpc-0123456789abcdef0", "subnets": [*zones]})
    says = r"network\.subnets: subnet-0123456789abcdef1 is in us-east-1e, but the machines are offered in us-east-1a$"
    with pytest.raises(StackError, match=says):
        network.existing(stack, ["us-east-1a"], ACCOUNT, pulumi.InvokeOptions())
    place = network.existing(stack, ["us-east-1a", "us-east-1e"], ACCOUNT, pulumi.InvokeOptions())
    assert place.private == {zone: subnet for subnet, zone in zones.items()}


SHARED = {"vpc": "vpc-0123456789abcdef0", "subnets": ["subnet-0123456789abcdef0"]}
OWNERS = "arn:aws:ec2:us-east-1:210987654321"


def test_in_subnets_that_another_account_shares_groups_are_made_and_machines_launched(changed, monkeypatch):
    """An ARN has its owner's account: with the stack's own in it, neither dstack nor a deployment could launch a machine there."""
    monkeypatch.setattr(preview_answers, "OWNER", "210987654321")
    plan = changed("aws-dev", {"network": SHARED, "ci": {"github": "me/mine"}, "dstack": {"host": "cloud"}})
    assert of(plan, "SecurityGroup")[0].inputs["vpcId"] == SHARED["vpc"]
    assert not {resource.kind for resource in on_aws(plan)} & {"Route", "RouteTable", "NatGateway", "VpcEndpoint", "Subnet"}
    subnet, vpc = f"{OWNERS}:subnet/{SHARED['subnets'][0]}", f"{OWNERS}:vpc/{SHARED['vpc']}"
    for name in ("flotilla-aws-dev-dstack-server", "flotilla-aws-dev-boundary"):
        launches = [statement for statement in policy(plan, name)["Statement"] if "ec2:RunInstances" in statement["Action"]]
        assert [subnet in statement["Resource"] for statement in launches] == [True], name
        assert vpc not in launches[0]["Resource"]
    [allowed] = [one for one in policy(plan, "flotilla-aws-dev-deploy-network")["Statement"] if one["Resource"] == [vpc, subnet]]
    assert allowed["Action"] == ["ec2:CreateSecurityGroup", "ec2:RunInstances"]


def test_a_network_of_the_account_itself_adds_no_right(changed):
    plan = changed("aws-dev", {"network": SHARED, "ci": {"github": "me/mine"}})
    assert "subnet-0123456789abcdef0" not in str(policy(plan, "flotilla-aws-dev-dstack-server"))
    assert "vpc-0123456789abcdef0" not in str(policy(plan, "flotilla-aws-dev-deploy-network"))
