"""Machines that Pulumi launches on GCP: interfaces, capacity, what they wait for, how they are reached."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
from support.gcp_plans import FLEX, NODE_TAG, VARIANTS, every
from support.plans import definition, of

from infra.gcp import preview_answers
from infra.preview import Plan


@pytest.mark.parametrize(
    ("name", "nics"),
    [
        ("prod", ["GVNIC"] * 2 + ["MRDMA"] * 8),
        ("tcpxo by pulumi, bastion", ["GVNIC"] * 9),
        ("flex-start", ["GVNIC"] * 2 + ["MRDMA"] * 8),
        ("disk", ["GVNIC"]),
    ],
)
def test_a_node_has_all_interfaces_of_its_fabric_each_in_a_subnet_of_its_own(name, nics, gcp_plan):
    [template] = of(gcp_plan(name), "InstanceTemplate")
    found = template.inputs["networkInterfaces"]
    assert [interface["nicType"] for interface in found] == nics
    assert len({interface["subnetwork"] for interface in found}) == len(nics)
    assert found[0]["subnetwork"] == f"subnetworks/flotilla-{VARIANTS[name][0]}"  # the main one first: it has the node's address


@pytest.mark.parametrize("machine", ["a3-megagpu-8g", "a3-ultragpu-8g"])
def test_a_lone_node_beside_a_fabric_is_not_wired_to_it(machine, changed):
    many = {"name": "many", "machine": "a3-megagpu-8g", "nodes": 2, "provision": "pulumi"}
    single = {"name": "one", "machine": machine, "nodes": 1, "provision": "pulumi", "capacity": {"kind": "spot"}}
    plan = changed("gcp-prod", {"fleets": [many, single]})
    wired, alone = of(plan, "InstanceTemplate")
    assert [len(wired.inputs["networkInterfaces"]), len(alone.inputs["networkInterfaces"])] == [9, 1]
    start = "tcpgpudmarxd"  # the image of TCPXO's daemon
    scripts = [node.inputs["metadata"]["startup-script"] for node in of(plan, "InstanceFromTemplate")]
    assert [start in script for script in scripts] == [True, True, False]


def script(plan: Plan) -> str:
    """What every node of a plan with one fleet runs: a queue launches them from the template as it is."""
    nodes = of(plan, "InstanceFromTemplate") or of(plan, "InstanceTemplate")
    [text] = {node.inputs["metadata"]["startup-script"] for node in nodes}
    return text


@every("prod", "tcpxo by pulumi, bastion", "flex-start", "share", "disk")
def test_a_node_is_shielded_and_people_come_in_by_os_login(name, gcp_plan):
    [template] = of(gcp_plan(name), "InstanceTemplate")
    shield = template.inputs["shieldedInstanceConfig"]
    assert (shield["enableVtpm"], shield["enableIntegrityMonitoring"]) == (True, True)
    for node in [template, *of(gcp_plan(name), "InstanceFromTemplate")]:
        metadata = node.inputs["metadata"]
        assert (metadata["enable-oslogin"], metadata["block-project-ssh-keys"], metadata["serial-port-enable"]) == ("TRUE", "TRUE", "FALSE")
    assert template.inputs["tags"] == [NODE_TAG]  # what the firewall lets talk
    assert template.inputs["serviceAccount"]["email"].startswith("flotilla-gcp-prod-nodes@")
    done = subprocess.run(["bash", "-n"], input=script(gcp_plan(name)), text=True, capture_output=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("name", "line"), [("prod", "gcsfuse "), ("share", "mount -t nfs "), ("disk", "mkfs.xfs /dev/disk/by-id/google-checkpoints")]
)
def test_nodes_mount_the_store_where_the_task_finds_it(name, line, gcp_plan):
    plan = gcp_plan(name)
    assert line in script(plan)
    assert "/var/lib/flotilla/checkpoints" in script(plan)
    assert definition(plan, "ray-cluster.dstack.yml")["volumes"] == ["/var/lib/flotilla/checkpoints:/checkpoints"]


def test_the_disk_is_attached_under_the_name_that_the_script_mounts(gcp_plan):
    [node], [disk] = of(gcp_plan("disk"), "InstanceFromTemplate"), of(gcp_plan("disk"), "Disk")
    [attached] = node.inputs["attachedDisks"]
    assert attached["deviceName"] == "checkpoints"
    assert attached["source"].endswith(disk.name)
    assert (disk.inputs["type"], disk.inputs["size"], disk.inputs["zone"]) == ("hyperdisk-ml", 1024, node.inputs["zone"])


def test_every_node_is_in_the_fleet_by_its_own_address(planned):
    plan = planned("gcp-prod")
    nodes = of(plan, "InstanceFromTemplate")
    assert [node.inputs["zone"] for node in nodes] == ["europe-west1-b"] * 4
    assert all(node.options["deleteBeforeReplace"] for node in nodes)  # there is no capacity for a second beside it
    assert len(set(definition(plan, "h200.fleet.dstack.yml")["ssh_config"]["hosts"])) == 4


def test_a_fabric_stands_side_by_side_unless_a_reservation_says_where(gcp_plan):
    [policy] = of(gcp_plan("tcpxo by pulumi, bastion"), "ResourcePolicy")
    [template] = of(gcp_plan("tcpxo by pulumi, bastion"), "InstanceTemplate")
    assert policy.inputs["groupPlacementPolicy"] == {"collocation": "COLLOCATED"}
    assert template.inputs["resourcePolicies"].endswith(policy.name)
    assert not of(gcp_plan("prod"), "ResourcePolicy")


@pytest.mark.parametrize(
    ("reservation", "project"), [("h200-training", "my-project-id"), ("projects/owner-project/reservations/h200-training", "owner-project")]
)
def test_machines_of_a_reservation_have_its_placement_policy(reservation, project, changed):
    capacity = {"kind": "reservation", "id": reservation, "policy": "compact"}
    plan = changed("gcp-prod", {"fleets.0.capacity": capacity})
    [template] = of(plan, "InstanceTemplate")
    assert template.inputs["resourcePolicies"] == f"projects/{project}/regions/europe-west1/resourcePolicies/compact"
    assert not of(plan, "ResourcePolicy")


def test_flex_start_asks_for_all_machines_at_once_and_waits(gcp_plan):
    plan = gcp_plan("flex-start")
    [group], [request], [policy] = (of(plan, kind) for kind in ("InstanceGroupManager", "ResizeRequest", "ResourcePolicy"))
    assert group.inputs["targetSize"] == 0
    assert group.options["ignoreChanges"] == ["targetSize"]
    assert (request.inputs["resizeBy"], request.inputs["instanceGroupManager"]) == (4, group.name)
    assert group.inputs["resourcePolicies"]["workloadPolicy"].endswith(policy.name)
    assert policy.inputs["workloadPolicy"] == {"type": "HIGH_THROUGHPUT"}
    assert group.inputs["allInstancesConfig"]["labels"]["stack"] == "gcp-prod"
    assert not of(plan, "InstanceFromTemplate")
    assert plan.outputs["next"] == ["pulumi up --stack gcp-prod --yes"]  # again, when they are there


def test_machines_that_were_granted_are_in_the_fleet(changed, monkeypatch):
    """The `up` after GCP started them: what the group and each machine answer then."""
    empty = preview_answers.answer

    def answer(token: str, arguments: dict[str, Any]) -> tuple[dict[str, Any], str]:
        if token.endswith(":getInstanceGroup"):
            return arguments | {"instances": ["zones/z/instances/h200-b", "zones/z/instances/h200-a"]}, "granted"
        if token.endswith(":getInstance"):
            name = arguments["selfLink"].rpartition("/")[2]
            return arguments | {"name": name, "networkInterfaces": [{"networkIp": f"10.64.0.{ord(name[-1])}"}]}, "running"
        return empty(token, arguments)

    monkeypatch.setattr(preview_answers, "answer", answer)
    plan = changed("gcp-prod", FLEX | {"fleets.0.nodes": 2})
    assert definition(plan, "h200.fleet.dstack.yml")["ssh_config"]["hosts"] == ["10.64.0.97", "10.64.0.98"]
    assert plan.outputs["next"][0].startswith("gcloud compute start-iap-tunnel h200-a 22 ")


@every("prod", "flex-start", "share")
def test_machines_start_when_they_can_reach_what_they_need(name, gcp_plan):
    plan = gcp_plan(name)
    needed = {
        resource.urn for kind in ("RouterNat", "BucketIAMMember", "Firewall") for resource in of(plan, kind) if "gpu" not in resource.name
    }
    for template in of(plan, "InstanceTemplate"):
        assert needed <= set(template.options["dependencies"])


def test_a_bastion_is_for_those_who_may_and_has_no_account(gcp_plan):
    plan = gcp_plan("tcpxo by pulumi, bastion")
    [machine_], [rule], [address] = (
        [resource for resource in of(plan, kind) if resource.name.endswith("-bastion")] for kind in ("Instance", "Firewall", "Address")
    )
    assert rule.inputs["sourceRanges"] == ["203.0.113.0/24"]
    assert rule.inputs["targetTags"] == machine_.inputs["tags"] != [NODE_TAG]
    assert "serviceAccount" not in machine_.inputs
    assert machine_.inputs["shieldedInstanceConfig"]["enableSecureBoot"] is True
    assert address.inputs["region"] == "europe-west1"
