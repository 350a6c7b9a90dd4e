"""Who reaches nodes and bastion on AWS."""

from __future__ import annotations

import pytest
from support.aws_plans import BY_PULUMI
from support.plans import of

from infra.preview import Resource

STACKS = ("aws-dev", "aws-prod")


@pytest.mark.parametrize("name", STACKS)
def test_rules_are_resources_of_their_own(name, planned):
    for group in of(planned(name), "SecurityGroup"):
        assert not {"ingress", "egress"} & group.inputs.keys()
        assert not (group.inputs.get("name") or group.name).startswith("sg-")  # AWS refuses such names


@pytest.mark.parametrize("name", STACKS)
def test_nodes_reach_one_another_in_both_directions_as_efa_asks(name, planned):
    plan = planned(name)
    [group] = [resource.id for resource in of(plan, "SecurityGroup") if resource.name.endswith("-nodes")]
    for way in ("SecurityGroupIngressRule", "SecurityGroupEgressRule"):
        own = [rule.inputs for rule in of(plan, way) if rule.inputs["securityGroupId"] == group]
        assert [rule["ipProtocol"] for rule in own if rule.get("referencedSecurityGroupId") == group] == ["-1"]


def open_to_all(ingress: list[Resource]) -> list[tuple[str, int, int]]:
    """The rules that let everybody in, with the first and the last port."""
    everybody = [resource for resource in ingress if resource.inputs.get("cidrIpv4") == "0.0.0.0/0"]
    return [(resource.name, int(resource.inputs["fromPort"]), int(resource.inputs["toPort"])) for resource in everybody]


def test_only_ssh_to_private_subnets_is_open_and_only_where_dstack_insists(planned, changed):
    plans = planned("aws-dev"), planned("aws-prod"), changed("aws-dev", BY_PULUMI)
    found = [open_to_all(of(plan, "SecurityGroupIngressRule")) for plan in plans]
    assert found == [[("flotilla-aws-dev-ssh", 22, 22)], [], []]
    [rule] = [resource for resource in planned("aws-dev").resources if resource.name == "flotilla-aws-dev-ssh"]
    assert rule.inputs["description"].startswith("as dstack wants it")  # a plan shows why


def test_a_bastion_lets_in_who_may_and_a_tunnel_nobody(planned, changed):
    plan = changed("aws-dev", BY_PULUMI)
    [bastion] = [resource for resource in of(plan, "SecurityGroup") if resource.name.endswith("-bastion")]
    into = [resource.inputs for resource in of(plan, "SecurityGroupIngressRule") if resource.inputs["securityGroupId"] == bastion.id]
    assert [(rule["cidrIpv4"], rule["fromPort"], rule["toPort"]) for rule in into] == [("203.0.113.7/32", 22, 22)]
    [bastion] = [resource for resource in of(planned("aws-prod"), "SecurityGroup") if resource.name.endswith("-bastion")]
    assert not [
        resource for resource in of(planned("aws-prod"), "SecurityGroupIngressRule") if resource.inputs["securityGroupId"] == bastion.id
    ]
