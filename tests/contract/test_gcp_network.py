"""The private network on GCP, an existing one, and the networks of the GPU fabric."""

from __future__ import annotations

from ipaddress import IPv4Network

import pytest
from support.gcp_plans import VARIANTS, every
from support.plans import backend, of


@every("dev", "tcpxo by dstack", "tcpx by dstack", "roce by dstack", "tcpxo by pulumi, bastion", "prod")
def test_subnets_lie_apart_and_reach_the_network_settings(name, gcp_plan):
    plan = gcp_plan(name)
    subnets = [IPv4Network(resource.inputs["ipCidrRange"]) for resource in of(plan, "Subnetwork")]
    whole = IPv4Network("10.64.0.0/16" if VARIANTS[name][0] == "gcp-prod" else "10.65.0.0/16")
    assert all(subnet.subnet_of(whole) for subnet in subnets)
    assert not any(subnet.overlaps(other) for index, subnet in enumerate(subnets) for other in subnets[:index])


@pytest.mark.parametrize(
    ("name", "vpcs", "rdma", "mtu"),
    [
        ("dev", 0, 0, 1460),
        ("tcpx by dstack", 4, 0, 8244),
        ("tcpxo by dstack", 8, 0, 8244),
        ("tcpxo by pulumi, bastion", 8, 0, 8244),
        ("roce by dstack", 1, 8, 8896),
        ("prod", 1, 8, 8896),
    ],
)
def test_a_fabric_has_its_networks(name, vpcs, rdma, mtu, gcp_plan):
    plan = gcp_plan(name)
    networks = of(plan, "Network")
    roce = [network for network in networks if "networkProfile" in network.inputs]
    assert (len(networks), len(roce)) == (1 + vpcs + bool(rdma), bool(rdma))
    assert {network.inputs["mtu"] for network in networks} == {mtu}
    assert {network.inputs["autoCreateSubnetworks"] for network in networks} == {False}
    assert len(of(plan, "Subnetwork")) == 1 + vpcs + rdma
    for network in roce:
        assert network.inputs["networkProfile"].endswith(
            ("/networkProfiles/us-central1-b-vpc-roce", "/networkProfiles/europe-west1-b-vpc-roce")
        )
        assert not [rule for rule in of(plan, "Firewall") if rule.inputs["network"] == network.name]  # the profile brings its own
        assert sum(subnet.inputs["network"] == network.id for subnet in of(plan, "Subnetwork")) == rdma


def test_nodes_reach_the_internet_by_nat_and_google_without(planned):
    [subnet], [nat], [router] = (of(planned("gcp-dev"), kind) for kind in ("Subnetwork", "RouterNat", "Router"))
    assert subnet.inputs["privateIpGoogleAccess"] is True
    assert nat.inputs["router"] == router.name
    assert [subnetwork["name"] for subnetwork in nat.inputs["subnetworks"]] == [subnet.id]


def test_flow_logs_are_kept_where_the_stack_says(planned):
    assert [("logConfig" in resource.inputs) for resource in of(planned("gcp-dev"), "Subnetwork")] == [False]
    assert sum("logConfig" in resource.inputs for resource in of(planned("gcp-prod"), "Subnetwork")) == 1  # of the nodes; not of the fabric


def test_an_existing_network_gets_rules_alone(gcp_plan):
    plan = gcp_plan("existing network")
    assert not [resource for kind in ("Network", "Subnetwork", "Router", "RouterNat") for resource in of(plan, kind)]
    assert {resource.inputs["network"] for resource in of(plan, "Firewall")} == {"mine"}
    config = backend(plan)
    assert (config["vpc_name"], config["subnetworks"], config["nat_check"]) == ("mine", {"us-central1": "nodes"}, False)


SHARED = {"vpc": "projects/host-project/global/networks/shared", "subnets": ["nodes"]}


def test_a_shared_vpc_is_left_to_the_admins_of_its_host_project(changed):
    plan = changed("gcp-dev", {"network": SHARED, "dstack": {"host": "cloud"}})
    assert not [resource for kind in ("Network", "Subnetwork", "Router", "Firewall", "SubnetworkIAMMember") for resource in of(plan, kind)]
    [asked] = [asked for asked in plan.assumed if asked.startswith("getSubnetwork ")]
    assert '"project": "host-project"' in asked
    [template] = of(plan, "InstanceTemplate")
    [nic] = template.inputs["networkInterfaces"]
    assert nic["subnetwork"] == "projects/host-project/regions/us-central1/subnetworks/nodes"
    config = backend(plan)
    assert (config["vpc_project_id"], config["vpc_name"], config["subnetworks"]) == ("host-project", "shared", {"us-central1": "nodes"})
    assert config["project_id"] == "my-project-id"


def test_rules_and_grants_are_made_in_the_host_project_where_the_stack_says(gcp_plan):
    plan = gcp_plan("shared vpc")
    rules = {rule.name: rule.inputs for rule in of(plan, "Firewall")}
    assert {name: (rule["sourceRanges"], rule["targetTags"]) for name, rule in rules.items()} == {
        "flotilla-gcp-dev-internal": (["10.0.0.0/20"], ["dstack-runner-instance"]),
        "flotilla-gcp-dev-control": (["35.235.240.0/20"], ["flotilla-gcp-dev-control"]),
        "flotilla-gcp-dev-control-health-0": (["35.191.0.0/16"], ["flotilla-gcp-dev-control"]),
        "flotilla-gcp-dev-control-health-1": (["130.211.0.0/22"], ["flotilla-gcp-dev-control"]),
    }
    assert {(rule["project"], rule["network"]) for rule in rules.values()} == {("host-project", SHARED["vpc"])}
    grants = of(plan, "SubnetworkIAMMember")
    where = {(grant.inputs["project"], grant.inputs["subnetwork"], grant.inputs["role"]) for grant in grants}
    assert where == {("host-project", "nodes", "roles/compute.networkUser")}
    assert {grant.inputs["member"] for grant in grants} == {
        "serviceAccount:flotilla-gcp-dev-dstack@my-project-id.iam.gserviceaccount.com",
        "serviceAccount:123456789012@cloudservices.gserviceaccount.com",  # makes the control node, as the one machine of a group
    }
    [group] = of(plan, "InstanceGroupManager")
    assert {rule.urn for rule in of(plan, "Firewall")} <= set(group.options["dependencies"])


def test_the_agent_that_makes_machines_of_a_queue_may_use_the_subnet(changed):
    flex = {"fleets.0.machine": "a3-highgpu-1g", "fleets.0.capacity": {"kind": "flex-start"}, "fleets.0.image": ..., "fleets.0.nodes": 2}
    network = SHARED | {"zones": ["europe-west1-b"], "host_rules": True}
    plan = changed("gcp-prod", flex | {"network": network})
    [grant] = of(plan, "SubnetworkIAMMember")
    assert grant.inputs["member"] == "serviceAccount:123456789012@cloudservices.gserviceaccount.com"
    [template] = of(plan, "InstanceTemplate")
    assert grant.urn in template.options["dependencies"]
