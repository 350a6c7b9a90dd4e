"""The network on AWS: subnets, gateways, routes, flow logs, or an existing one."""

from __future__ import annotations

import json
from types import SimpleNamespace

import aws_api
import pulumi
import pytest
from aws_plans import BY_PULUMI, on_aws, policy, template
from plans import backend, of

from infra.aws import network
from stacks.load import StackError


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
    [log], [group] = of(plan, "FlowLog"), of(plan, "LogGroup")
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
    monkeypatch.setattr(network.ec2, "get_subnet", lambda id, **_: SimpleNamespace(availability_zone=zones[id]))
    monkeypatch.setattr(network.ec2, "get_vpc", lambda **_: SimpleNamespace(cidr_block="10.0.0.0/16"))
    stack = aws_api.stack(network={"vpc": "vpc-0123456789abcdef0", "subnets": [*zones]})
    says = r"network\.subnets: subnet-0123456789abcdef1 is in us-east-1e, but the machines are offered in us-east-1a$"
    with pytest.raises(StackError, match=says):
        network.existing(stack, ["us-east-1a"], pulumi.InvokeOptions())
    place = network.existing(stack, ["us-east-1a", "us-east-1e"], pulumi.InvokeOptions())
    assert place.private == {zone: subnet for subnet, zone in zones.items()}
