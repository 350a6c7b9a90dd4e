"""What GCP is asked of networks: of a server on this machine that answers as Google's REST interfaces do."""

from __future__ import annotations

from typing import Any

import pytest
from support.gcp_api import COMPUTE, LINK, Answers, Google, stack

from infra.gcp.preflight import network as gcp

HERE = {"vpc": "shared", "subnets": ["nodes"]}
SUBNET = {"name": "nodes", "network": f"{LINK}/global/networks/shared", "ipCidrRange": "10.0.0.0/28"}
FREE = {"utilizationDetails": {"ipv4Utilizations": [{"totalFreeIp": "2"}]}}


@pytest.mark.parametrize(
    ("answer", "nodes", "verdict", "says"),
    [
        (SUBNET, 11, "ok", "nodes (10.0.0.0/28) has 12 addresses"),
        (SUBNET, 12, "failed", "has 12 addresses; the stack needs 13"),  # the control node stands beside them
        (SUBNET | FREE, 1, "ok", "has 2 free addresses"),
        (SUBNET | FREE, 2, "failed", "has 2 free addresses; the stack needs 3"),
        (SUBNET | {"network": f"{LINK}/global/networks/other"}, 1, "failed", "nodes is of other, not of shared"),
        (None, 1, "failed", "there is no nodes in us-central1"),
    ],
)
def test_the_subnet_of_an_existing_network_must_be_its_own_with_room_for_the_nodes(answer, nodes, verdict, says, google):
    answers = {f"{COMPUTE}/regions/us-central1/subnetworks/nodes": answer} if answer else {}
    [found] = gcp.subnets(google(stack(fleet={"nodes": nodes}, network=HERE), answers))
    assert found.verdict == verdict and says in found.says
    assert {"views": ["WITH_UTILIZATION"]} in Google.queries


@pytest.mark.parametrize(
    ("there", "verdict", "says"),
    [
        (True, "ok", "europe-west1-b-vpc-roce"),
        (False, "failed", "there is no network profile europe-west1-b-vpc-roce, so no RoCE network in europe-west1-b"),
    ],
)
def test_a_roce_network_needs_its_profile_in_the_zone(there, verdict, says, google):
    answers = {f"{COMPUTE}/global/networkProfiles/europe-west1-b-vpc-roce": {"name": "europe-west1-b-vpc-roce"}} if there else {}
    [found] = gcp.roce(google(stack("gcp-prod"), answers))
    assert (found.verdict, found.says) == (verdict, says)
    assert not [*gcp.roce(google(stack("gcp-prod", fleet={"nodes": 1}), answers))]  # a lone node needs no fabric


def route(**settings: Any) -> Answers:
    return {f"{COMPUTE}/global/routes": {"items": [{"name": "out", "network": f"{LINK}/global/networks/shared"} | settings]}}


def router(**settings: Any) -> Answers:
    nat = {"name": "nat", "sourceSubnetworkIpRangesToNat": "ALL_SUBNETWORKS_ALL_IP_RANGES"} | settings
    return {f"{COMPUTE}/regions/us-central1/routers": {"items": [{"network": f"{LINK}/global/networks/shared", "nats": [nat]}]}}


INTERNET = {"nextHopGateway": f"{LINK}/global/gateways/default-internet-gateway"}
LISTED = {"sourceSubnetworkIpRangesToNat": "LIST_OF_SUBNETWORKS"}


@pytest.mark.parametrize(
    ("answers", "verdict", "says"),
    [
        (route(**INTERNET) | router(), "ok", "nodes reaches the internet through nat"),
        (
            route(**INTERNET) | router(**LISTED, subnetworks=[{"name": f"{LINK}/regions/us-central1/subnetworks/nodes"}]),
            "ok",
            "through nat",
        ),
        (
            route(**INTERNET) | router(**LISTED, subnetworks=[{"name": f"{LINK}/regions/us-central1/subnetworks/n"}]),
            "failed",
            "no Cloud NAT",
        ),
        (route(nextHopIp="10.0.0.9"), "ok", "nodes reaches the internet through out"),
        (route(**INTERNET), "failed", "nodes has no Cloud NAT, over which the control node installs the dstack server"),
        (route(**INTERNET, network=f"{LINK}/global/networks/other") | router(), "failed", "nodes has no route to the internet"),
        (route(nextHopIp="10.0.0.9", tags=["web"]), "failed", "nodes has no route to the internet"),
        ({}, "failed", "nodes has no route to the internet"),
    ],
)
def test_a_control_node_in_a_network_of_yours_has_a_way_out(answers, verdict, says, google):
    nothing = {f"{COMPUTE}/global/routes": {}, f"{COMPUTE}/regions/us-central1/routers": {}}
    [found] = gcp.way_out(google(stack(network=HERE), nothing, answers))
    assert found.verdict == verdict and says in found.says, found
    assert {"filter": ["destRange=0.0.0.0/0"]} in Google.queries


def test_a_way_out_is_not_asked_for_where_the_network_is_new_or_there_is_no_control_node(google):
    assert not [*gcp.way_out(google(stack()))]
    assert not [*gcp.way_out(google(stack(network=HERE, dstack={"host": "elsewhere"})))]
