"""What AWS is asked of a network that is there already: against moto's EC2."""

from __future__ import annotations

import boto3
import pytest
from support.aws_api import REGION, api, existing_network, stack, stubbed

from infra.aws.preflight import network as aws
from infra.aws.preflight.api import answers

pytestmark = pytest.mark.usefixtures("aws_keys")
VPC = {"vpc": "vpc-0123456789abcdef0", "subnets": ["subnet-0123456789abcdef0", "subnet-0123456789abcdef1"]}


def test_a_subnet_in_a_zone_without_the_machine_fails(ec2):
    offered = aws.offering_zones(api(stack(), ec2=ec2), "p4d.24xlarge")
    [zone, *_] = sorted({f"us-east-1{letter}" for letter in "abcdef"} - set(offered))
    vpc, [subnet] = existing_network(ec2, "10.1.1.0/24", zone=zone)
    found = [*aws.subnets(api(stack(fleet={"machine": "p4d.24xlarge"}, network={"vpc": vpc, "subnets": [subnet]}), ec2=ec2))]
    assert [answer.verdict for answer in found] == ["failed", "ok"]
    assert found[0].says == f"{subnet} is in {zone}, which does not offer p4d.24xlarge"


def test_subnets_of_an_existing_network_must_be_its_own_with_room_for_the_nodes(ec2):
    vpc, [small, large] = existing_network(ec2, "10.1.0.0/28", "10.1.1.0/24")
    here = {"vpc": vpc, "subnets": [small, large]}
    [found] = aws.subnets(api(stack(network=here), ec2=ec2))
    assert found.verdict == "ok" and f"{small} has 11 free addresses" in found.says  # AWS keeps five
    [found] = aws.subnets(api(stack(fleet={"nodes": 300}, network=here), ec2=ec2))
    assert found.verdict == "failed" and "the stack needs 301" in found.says  # the control node is one

    other, _ = existing_network(ec2, "10.1.0.0/28")
    first, *_ = aws.subnets(api(stack(network=here | {"vpc": other}), ec2=ec2))
    assert (first.verdict, first.says) == ("failed", f"{small} is of {vpc}, not of {other}")


def test_nodes_of_pulumi_stand_together_in_the_first_subnet():
    of = stack("aws-prod", fleet={"nodes": 12, "capacity": {"kind": "on-demand"}}, network=VPC)
    small, large = of.network.subnets
    [found] = aws.room(of, {small: 11, large: 251})
    assert found.verdict == "failed" and f"12 nodes stand in {small}" in found.says
    assert [answer.verdict for answer in aws.room(of, {small: 12, large: 0})] == ["ok"]


def test_an_unknown_subnet_is_aws_word(ec2):
    found = answers("subnets", aws.subnets, api(stack(network=VPC), ec2=ec2))
    assert [(answer.verdict, "subnet-0123456789abcdef" in answer.says) for answer in found] == [("failed", True)]


@pytest.mark.parametrize(("owner", "verdicts"), [("test", []), ("another", ["failed"]), (None, ["failed"])])
def test_a_project_of_dstack_has_one_group_in_a_network(owner, verdicts, ec2):
    of = stack(network=VPC)
    tags = [{"Key": "stack", "Value": of.name if owner == "test" else owner}] if owner else []
    there = {"SecurityGroups": [{"GroupName": "dstack_security_group_main", "Tags": tags}]}
    wanted = {"Filters": [{"Name": "vpc-id", "Values": [of.network.vpc]}, {"Name": "group-name", "Values": ["dstack_security_group_main"]}]}
    found = list(aws.group(api(of, ec2=stubbed("ec2", ("describe_security_groups", there, wanted)))))
    assert [answer.verdict for answer in found] == verdicts
    assert all(f"of {owner or 'somebody else'}; dstack has one for a project" in answer.says for answer in found)


# Of another account


@pytest.mark.parametrize(
    ("route", "verdict", "says"),
    [
        ({"NatGatewayId": "nat-1"}, "ok", "and reaches the internet through nat-1"),
        ({"TransitGatewayId": "tgw-1"}, "ok", "and reaches the internet through tgw-1"),
        ({"GatewayId": "igw-1"}, "failed", "without a route to the internet that is seen here; dstack passes it by"),
        ({"NatGatewayId": "nat-1", "State": "blackhole"}, "failed", "without a route to the internet that is seen here"),
        (None, "failed", "without a route to the internet that is seen here"),
    ],
)
def test_a_shared_subnet_must_have_a_way_out_which_is_its_owners_to_make(route, verdict, says, ec2):
    vpc, [first, _] = VPC["vpc"], VPC["subnets"]
    own = [{"Name": "association.subnet-id", "Values": [first]}]
    main = [{"Name": "vpc-id", "Values": [vpc]}, {"Name": "association.main", "Values": ["true"]}]
    routes = [{"DestinationCidrBlock": "10.0.0.0/16", "GatewayId": "local"}]
    table = {"RouteTables": [{"Routes": [*routes, {"DestinationCidrBlock": "0.0.0.0/0"} | (route or {})]}]}
    none = [("describe_route_tables", {"RouteTables": []}, {"Filters": filters}) for filters in (own, main)]
    found = {"Subnets": [{"SubnetId": first, "OwnerId": "210987654321"}]}
    asked = stubbed(
        "ec2",
        ("describe_subnets", found, {"SubnetIds": [first]}),
        *([("describe_route_tables", table, {"Filters": own})] if route else none),
    )
    of = stack(network=VPC | {"subnets": [first]})
    [answer] = aws.shared(api(of, ec2=asked, sts=boto3.client("sts", region_name=REGION)))
    assert answer.verdict == verdict and answer.says.startswith(f"{first} is shared by account 210987654321, {says}"), answer
    assert answer.fix.startswith("ask 210987654321 to route 0.0.0.0/0") == (verdict == "failed")


def test_subnets_of_the_account_itself_are_not_said_to_be_shared(ec2):
    vpc, subnets = existing_network(ec2, "10.1.0.0/24")
    of = stack(network={"vpc": vpc, "subnets": subnets})
    assert not [*aws.shared(api(of, ec2=ec2, sts=boto3.client("sts", region_name=REGION)))]
    assert not [*aws.shared(api(stack()))]
