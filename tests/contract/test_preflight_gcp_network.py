"""What GCP is asked of networks: of a server on this machine that answers as Google's REST interfaces do."""

from __future__ import annotations

import pytest
from gcp_api import COMPUTE, LINK, Google, stack

from infra.gcp import preflight_network as gcp

HERE = {"vpc": "shared", "subnets": ["nodes"]}
SUBNET = {"name": "nodes", "network": f"{LINK}/global/networks/shared", "ipCidrRange": "10.0.0.0/28"}
FREE = {"utilizationDetails": {"ipv4Utilizations": [{"totalFreeIp": "1"}]}}


@pytest.mark.parametrize(
    ("answer", "nodes", "verdict", "says"),
    [
        (SUBNET, 12, "ok", "nodes (10.0.0.0/28) has 12 addresses"),
        (SUBNET, 13, "failed", "has 12 addresses; the fleets have 13 nodes"),
        (SUBNET | FREE, 1, "ok", "has 1 free addresses"),
        (SUBNET | FREE, 2, "failed", "has 1 free addresses; the fleets have 2 nodes"),
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
