"""What an account may have at once, against what a stack wants: vCPUs, networks, public addresses."""

from __future__ import annotations

from typing import Any

import pytest
from support.aws_api import api, stack, stubbed
from support.aws_plans import BY_PULUMI

from infra.aws.preflight import quotas as preflight

pytestmark = pytest.mark.usefixtures("aws_keys")
ELSEWHERE = {"host": "elsewhere"}
VPC = {"vpc": "vpc-0123456789abcdef0", "subnets": ["subnet-0123456789abcdef0"]}


def quota(code: str, value: float) -> tuple[str, Any, dict[str, str]]:
    answer = {"Quota": {"QuotaCode": code, "QuotaName": f"name of {code}", "Value": value}}
    return "get_service_quota", answer, {"ServiceCode": "ec2", "QuotaCode": code}


@pytest.mark.parametrize(
    ("machine", "kind", "code"),
    [
        ("p5.48xlarge", "on-demand", "L-417A185B"),
        ("p6-b200.48xlarge", "on-demand", "L-417A185B"),
        ("p5en.48xlarge", "spot", "L-C4BD4855"),
        ("p4d.24xlarge", "spot", "L-7212CCBC"),
        ("p6-b200.48xlarge", "spot", None),
        ("g6.8xlarge", "on-demand", "L-DB2E81BA"),
        ("g6e.xlarge", "spot", "L-3819A6DF"),
        ("m7i.xlarge", "on-demand", "L-1216C47A"),
        ("m7i.xlarge", "spot", "L-34B43A08"),
    ],
)
def test_each_way_to_buy_a_family_has_its_quota(machine, kind, code):
    assert preflight.quota_code(machine, kind) == code


@pytest.mark.parametrize(("value", "verdict"), [(63, "failed"), (64, "ok")])
def test_the_quota_must_cover_all_vcpus_of_the_fleet(value, verdict):
    [found] = preflight.quota(api(stack(dstack=ELSEWHERE), service_quotas=stubbed("service-quotas", quota("L-3819A6DF", value))))
    assert found.verdict == verdict  # two g6.8xlarge have 64
    assert found.says == f"name of L-3819A6DF: {value} vCPUs in us-east-1, the stack needs 64"
    assert ("--quota-code L-3819A6DF --desired-value 64 --region us-east-1" in found.fix) == (verdict == "failed")


def test_fleets_of_one_quota_are_added_up():
    of = stack(dstack=ELSEWHERE)
    both = of.model_copy(update={"fleets": (of.fleets[0], of.fleets[0].model_copy(update={"name": "more"}))})
    [found] = preflight.quota(api(both, service_quotas=stubbed("service-quotas", quota("L-3819A6DF", 100))))
    assert (found.verdict, "needs 128" in found.says) == ("failed", True)


@pytest.mark.parametrize(("value", "verdict"), [(1, "failed"), (2, "ok")])
def test_the_control_node_counts_as_the_on_demand_machine_that_it_is(value, verdict):
    answers = stubbed("service-quotas", quota("L-3819A6DF", 64), quota("L-1216C47A", value))
    fleet, node = preflight.quota(api(stack(), service_quotas=answers))
    assert (fleet.verdict, node.verdict) == ("ok", verdict)
    assert node.says == f"name of L-1216C47A: {value} vCPUs in us-east-1, the stack needs 2"


def test_what_is_reserved_or_has_no_known_quota_is_not_asked():
    [reserved] = preflight.quota(api(stack("aws-prod"), service_quotas=stubbed("service-quotas")))
    assert reserved.verdict == "ok"
    [spot] = preflight.quota(api(stack(fleet={"machine": "p6-b200.48xlarge"}, dstack=ELSEWHERE), service_quotas=stubbed("service-quotas")))
    assert spot.verdict == "unknown" and "servicequotas" in spot.fix


def test_a_quota_that_the_region_does_not_tell_is_unknown():
    wanted = {"ServiceCode": "ec2", "QuotaCode": "L-3819A6DF"}
    [found] = preflight.quota(
        api(stack(dstack=ELSEWHERE), service_quotas=stubbed("service-quotas", ("get_service_quota", "NoSuchResourceException", wanted)))
    )
    assert found.verdict == "unknown" and "needs 64 vCPUs" in found.says


# Networks and public addresses


def limits(vpcs: float, addresses: float | None = None) -> Any:
    """A client that tells these quotas, in the order in which they are asked."""
    answers = [("vpc", preflight.VPCS, vpcs), ("ec2", preflight.ELASTIC_IPS, addresses)]
    return stubbed(
        "service-quotas",
        *(
            ("get_service_quota", {"Quota": {"Value": value}}, {"ServiceCode": service, "QuotaCode": code})
            for service, code, value in answers
            if value is not None
        ),
    )


def test_one_more_network_and_its_address_must_fit(ec2):
    ec2.allocate_address(Domain="vpc")
    there = len(ec2.describe_vpcs()["Vpcs"])
    vpcs, addresses = preflight.network_quota(api(stack(), ec2=ec2, service_quotas=limits(there + 1, 2)))
    assert (vpcs.verdict, addresses.verdict) == ("ok", "ok")
    vpcs, addresses = preflight.network_quota(api(stack(), ec2=ec2, service_quotas=limits(there, 1)))
    assert (vpcs.verdict, vpcs.says) == ("failed", f"networks: {there} of others in us-east-1, the stack needs 1, the quota is {there}")
    assert f"--service-code vpc --quota-code L-F678F1CE --desired-value {there + 1} --region us-east-1" in vpcs.fix
    assert (addresses.verdict, addresses.says) == (
        "failed",
        "public addresses: 1 of others in us-east-1, the stack needs 1, the quota is 1",
    )
    assert "--service-code ec2 --quota-code L-0263D0A3 --desired-value 2" in addresses.fix


def test_what_the_stack_has_made_is_not_in_its_way(ec2):
    there = len(ec2.describe_vpcs()["Vpcs"])
    own = [{"Key": "project", "Value": "flotilla"}, {"Key": "stack", "Value": "aws-dev"}, {"Key": "owner", "Value": "me"}]
    ec2.create_vpc(CidrBlock="10.64.0.0/16", TagSpecifications=[{"ResourceType": "vpc", "Tags": own}])
    other = [{"Key": "project", "Value": "flotilla"}, {"Key": "stack", "Value": "aws-prod"}]
    ec2.create_vpc(CidrBlock="10.65.0.0/16", TagSpecifications=[{"ResourceType": "vpc", "Tags": other}])
    vpcs, _ = preflight.network_quota(api(stack(), ec2=ec2, service_quotas=limits(there + 2, 5)))
    assert (vpcs.verdict, f"networks: {there + 1} of others" in vpcs.says) == ("ok", True)


def test_a_gateway_in_each_zone_and_a_bastion_want_an_address_each(ec2):
    zones = {"zones": ["us-east-1a", "us-east-1b"], "nat": "per-zone"}
    _, found = preflight.network_quota(api(stack(network=zones), ec2=ec2, service_quotas=limits(5, 5)))
    assert "the stack needs 2" in found.says
    fleet = {"provision": "pulumi", "idle_duration": ...}
    _, found = preflight.network_quota(
        api(stack(fleet=fleet, network=zones, access=BY_PULUMI["access"], dstack=ELSEWHERE), ec2=ec2, service_quotas=limits(5, 2))
    )
    assert (found.verdict, "the stack needs 3" in found.says) == ("failed", True)


def test_an_existing_network_wants_nothing(ec2):
    assert [*preflight.network_quota(api(stack(network=VPC), ec2=ec2, service_quotas=stubbed("service-quotas")))] == []


def test_a_quota_that_is_not_told_is_unknown(ec2):
    refused = [
        ("get_service_quota", "NoSuchResourceException", {"ServiceCode": service, "QuotaCode": code})
        for service, code in (("vpc", preflight.VPCS), ("ec2", preflight.ELASTIC_IPS))
    ]
    found = [*preflight.network_quota(api(stack(), ec2=ec2, service_quotas=stubbed("service-quotas", *refused)))]
    assert [answer.verdict for answer in found] == ["unknown", "unknown"]
    assert "services/vpc/quotas?region=us-east-1" in found[0].fix
