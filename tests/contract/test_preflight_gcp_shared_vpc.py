"""What GCP is asked of a Shared VPC: of a server on this machine that answers as Google's REST interfaces do."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from support.gcp_api import COMPUTE, Answers
from support.gcp_api import stack as any_stack

from infra.gcp.preflight import shared_vpc as gcp
from infra.gcp.shared_vpc import Rule

stack = partial(any_stack, dstack={"host": "elsewhere"})
NETWORK = {
    "vpc": "projects/host-project/global/networks/shared",
    "subnets": ["projects/host-project/regions/us-central1/subnetworks/nodes"],
}
HOST = "compute/compute/v1/projects/host-project"
LINK = "https://www.googleapis.com/compute/v1/projects/host-project"
SUBNET = f"{HOST}/regions/us-central1/subnetworks/nodes"
ATTACHED = {f"{COMPUTE}/getXpnHost": {"name": "host-project"}, SUBNET: {"ipCidrRange": "10.0.0.0/20"}}
INTERNAL = {
    "name": "internal",
    "network": f"{LINK}/global/networks/shared",
    "direction": "INGRESS",
    "sourceRanges": ["10.0.0.0/8"],
    "allowed": [{"IPProtocol": "all"}],
}
NAT = {"name": "out", "sourceSubnetworkIpRangesToNat": "ALL_SUBNETWORKS_ALL_IP_RANGES"}
ROUTER = {"network": f"{LINK}/global/networks/shared", "nats": [NAT]}
SERVER = "flotilla-gcp-dev-dstack@my-project-id.iam.gserviceaccount.com"


def there(*rules: dict[str, Any], routers: tuple[dict[str, Any], ...] = (ROUTER,)) -> Answers:
    return ATTACHED | {f"{HOST}/global/firewalls": {"items": [*rules]}, f"{HOST}/regions/us-central1/routers": {"items": [*routers]}}


def test_a_project_that_is_attached_to_a_host_with_rules_and_nat_is_in_order(google):
    found = list(gcp.host_project(google(stack(network=NETWORK), there(INTERNAL))))
    assert [answer.verdict for answer in found] == ["ok"] * 3, found
    assert [answer.says.partition(":")[0] for answer in found] == [
        "my-project-id is attached to host-project",
        "internal of host-project is there",
        "nodes reaches the internet through Cloud NAT out",
    ]


@pytest.mark.parametrize(("host", "says"), [({}, "no host project"), ({"name": "other-project"}, "other-project")])
def test_a_project_that_is_not_attached_ends_the_questions(host, says, google):
    [found] = gcp.host_project(google(stack(network=NETWORK), {f"{COMPUTE}/getXpnHost": host}))
    assert (found.verdict, found.says) == ("failed", f"my-project-id is attached to {says}, not to host-project")
    assert found.fix == "gcloud compute shared-vpc associated-projects add my-project-id --host-project host-project"


def test_each_rule_that_is_missing_is_named_with_the_line_that_makes_it(google):
    of = stack(network=NETWORK, dstack={"host": "cloud"})
    found = [answer for answer in gcp.host_project(google(of, there())) if answer.verdict == "failed"]
    assert [answer.fix for answer in found] == [
        "gcloud compute firewall-rules create flotilla-gcp-dev-internal --project host-project --network shared --direction INGRESS "
        "--source-ranges 10.0.0.0/20 --target-tags dstack-runner-instance --allow all",
        "gcloud compute firewall-rules create flotilla-gcp-dev-control --project host-project --network shared --direction INGRESS "
        "--source-ranges 35.235.240.0/20 --target-tags flotilla-gcp-dev-control --allow tcp:22",
        "gcloud compute firewall-rules create flotilla-gcp-dev-control-health-0 --project host-project --network shared "
        "--direction INGRESS --source-ranges 35.191.0.0/16 --target-tags flotilla-gcp-dev-control --allow tcp:22",
        "gcloud compute firewall-rules create flotilla-gcp-dev-control-health-1 --project host-project --network shared "
        "--direction INGRESS --source-ranges 130.211.0.0/22 --target-tags flotilla-gcp-dev-control --allow tcp:22",
    ]


NODES = Rule("nodes", "10.0.0.0/20", "dstack-runner-instance", ssh=False, why="")
SSH = Rule("ssh", "35.235.240.0/20", "dstack-runner-instance", ssh=True, why="")
ALL = [{"IPProtocol": "tcp", "ports": ["0-65535"]}, {"IPProtocol": "udp"}, {"IPProtocol": "icmp"}]


@pytest.mark.parametrize(
    ("wanted", "change", "admitted"),
    [
        (NODES, {}, True),
        (NODES, {"targetTags": ["dstack-runner-instance", "web"]}, True),
        (NODES, {"targetTags": ["web"]}, False),
        (NODES, {"targetServiceAccounts": ["web@other.iam.gserviceaccount.com"]}, False),
        (NODES, {"direction": "EGRESS"}, False),
        (NODES, {"disabled": True}, False),
        (NODES, {"sourceRanges": ["10.0.0.0/21"]}, False),
        (NODES, {"sourceRanges": ["fd00::/8", "10.0.0.0/20"]}, True),
        (NODES, {"allowed": ALL}, True),
        (NODES, {"allowed": ALL[:2]}, False),
        (NODES, {"allowed": [{"IPProtocol": "tcp", "ports": ["22"]}, *ALL[1:]]}, False),
        (NODES, {"allowed": [], "denied": [{"IPProtocol": "all"}]}, False),
        (SSH, {"sourceRanges": ["35.235.240.0/20"], "allowed": [{"IPProtocol": "tcp", "ports": ["20-25"]}]}, True),
        (SSH, {"sourceRanges": ["35.235.240.0/20"], "allowed": [{"IPProtocol": "tcp", "ports": ["443"]}]}, False),
        (SSH, {"sourceRanges": ["0.0.0.0/0"], "allowed": [{"IPProtocol": "tcp"}]}, True),
    ],
)
def test_a_rule_of_the_host_project_must_let_in_all_that_is_wanted(wanted, change, admitted):
    assert gcp.admits(INTERNAL | change, wanted) == admitted


@pytest.mark.parametrize(
    ("hidden", "what", "source"),
    [(f"{HOST}/global/firewalls", "firewall rules", "10.0.0.0/20"), (SUBNET, "its subnet nodes", "RANGE_OF_THE_SUBNET")],
)
def test_rules_that_the_asker_may_not_see_are_named_and_fail_nothing(hidden, what, source, google):
    answers = there() | {hidden: (403, "Required permission")}
    _, found, *_ = gcp.host_project(google(stack(network=NETWORK), answers))
    assert found.verdict == "unknown" and found.says.startswith(f"you may not see {what} in host-project, which needs this: Nodes talk")
    assert found.fix.startswith("gcloud compute firewall-rules create flotilla-gcp-dev-internal --project host-project")
    assert f"--source-ranges {source} " in found.fix


@pytest.mark.parametrize(
    ("nat", "verdict"),
    [
        (NAT, "ok"),
        (NAT | {"sourceSubnetworkIpRangesToNat": "LIST_OF_SUBNETWORKS", "subnetworks": [{"name": f"{LINK}/a/subnetworks/nodes"}]}, "ok"),
        (NAT | {"sourceSubnetworkIpRangesToNat": "LIST_OF_SUBNETWORKS", "subnetworks": [{"name": f"{LINK}/a/subnetworks/b"}]}, "unknown"),
        (None, "unknown"),
    ],
)
def test_a_subnet_without_nat_is_said_with_the_lines_that_make_one(nat, verdict, google):
    routers = (ROUTER | {"nats": [nat]},) if nat else ()
    *_, found = gcp.host_project(google(stack(network=NETWORK), there(INTERNAL, routers=routers)))
    assert found.verdict == verdict
    assert ("gcloud compute routers nats create nodes --project host-project" in found.fix) == (verdict == "unknown")


# Grants

NUMBER = {"cloudresourcemanager/v1/projects/my-project-id": {"projectNumber": "42"}}
ON_SUBNET, ON_HOST = f"{SUBNET}/getIamPolicy", "cloudresourcemanager/v1/projects/host-project:getIamPolicy"


def granted(*members: str, role: str = "roles/compute.networkUser") -> dict[str, Any]:
    return {"bindings": [{"role": role, "members": [f"serviceAccount:{member}" for member in members]}]}


@pytest.mark.parametrize(
    ("subnet", "host", "verdict"),
    [
        (granted(SERVER), {}, "ok"),
        ({}, granted(SERVER), "ok"),
        ({}, granted(SERVER, role="roles/viewer"), "unknown"),
        ({}, {}, "unknown"),
        ((403, "denied"), (403, "denied"), "unknown"),
    ],
)
def test_the_server_of_dstack_wants_the_subnet_which_is_granted_once_its_account_is_there(subnet, host, verdict, google):
    [found] = gcp.grants(google(stack(network=NETWORK), NUMBER, {ON_SUBNET: subnet, ON_HOST: host}))
    assert found.verdict == verdict and SERVER in found.says
    wanted = "gcloud compute networks subnets add-iam-policy-binding nodes --project host-project --region us-central1 --member "
    assert found.fix == ("" if verdict == "ok" else f"{wanted}serviceAccount:{SERVER} --role roles/compute.networkUser")


@pytest.mark.parametrize(("permissions", "verdict"), [(["compute.subnetworks.use"], "ok"), ([], "failed")])
def test_whoever_runs_pulumi_must_be_allowed_to_put_machines_into_the_subnet(permissions, verdict, google):
    of = stack(network=NETWORK, dstack={"host": "cloud"})
    answers = {f"{SUBNET}/testIamPermissions": {"permissions": permissions}, ON_SUBNET: granted(SERVER), ON_HOST: {}}
    first, agent, _ = gcp.grants(google(of, NUMBER, answers))
    assert first.verdict == verdict
    assert agent.verdict == "failed" and "42@cloudservices.gserviceaccount.com may not use nodes" in agent.says
    assert ("--member user:YOU --role roles/compute.networkUser" in first.fix) == (verdict == "failed")


def test_a_stack_that_is_told_to_make_rules_and_grants_misses_none(google):
    of = stack(network=NETWORK | {"host_rules": True})
    found = [*gcp.host_project(google(of, there())), *gcp.grants(google(of, NUMBER, {ON_SUBNET: {}, ON_HOST: {}}))]
    assert [answer.verdict for answer in found] == ["ok"] * 4, found


def test_another_network_is_not_asked_for(google):
    for of in (stack(), stack(network={"vpc": "mine", "subnets": ["nodes"]})):
        assert not [*gcp.host_project(google(of)), *gcp.grants(google(of))]
