"""Who reaches nodes and bastion on AWS."""

from __future__ import annotations

import pytest

from infra.preview import Resource

STACKS = ("aws-dev", "aws-prod")


@pytest.mark.parametrize("name", STACKS)
def test_rules_are_resources_of_their_own(name, planned, of):
    for group in of(planned(name), "SecurityGroup"):
        assert not {"ingress", "egress"} & group.inputs.keys()
        assert not (group.inputs.get("name") or group.name).startswith("sg-")  # AWS refuses such names


@pytest.mark.parametrize("name", STACKS)
def test_nodes_reach_one_another_in_both_directions_as_efa_asks(name, planned, of):
    plan = planned(name)
    [group] = [one.id for one in of(plan, "SecurityGroup") if one.name.endswith("-nodes")]
    for way in ("SecurityGroupIngressRule", "SecurityGroupEgressRule"):
        own = [rule.inputs for rule in of(plan, way) if rule.inputs["securityGroupId"] == group]
        assert [rule["ipProtocol"] for rule in own if rule.get("referencedSecurityGroupId") == group] == ["-1"]


def open_to_all(ingress: list[Resource]) -> list[tuple[str, int]]:
    """The rules that let everybody in, with the port."""
    return [(one.name, int(one.inputs["fromPort"])) for one in ingress if one.inputs.get("cidrIpv4") == "0.0.0.0/0"]


def test_only_ssh_to_private_subnets_is_open_and_only_where_dstack_insists(planned, changed, of, by_pulumi):
    plans = planned("aws-dev"), planned("aws-prod"), changed("aws-dev", by_pulumi)
    found = [open_to_all(of(plan, "SecurityGroupIngressRule")) for plan in plans]
    assert found == [[("flotilla-aws-dev-ssh", 22)], [], []]


def test_a_bastion_lets_in_who_may_and_a_tunnel_nobody(planned, changed, of, by_pulumi):
    plan = changed("aws-dev", by_pulumi)
    [bastion] = [one for one in of(plan, "SecurityGroup") if one.name.endswith("-bastion")]
    into = [one.inputs for one in of(plan, "SecurityGroupIngressRule") if one.inputs["securityGroupId"] == bastion.id]
    assert [(one["cidrIpv4"], one["fromPort"], one["toPort"]) for one in into] == [("203.0.113.7/32", 22, 22)]
    [bastion] = [one for one in of(planned("aws-prod"), "SecurityGroup") if one.name.endswith("-bastion")]
    assert not [one for one in of(planned("aws-prod"), "SecurityGroupIngressRule") if one.inputs["securityGroupId"] == bastion.id]
