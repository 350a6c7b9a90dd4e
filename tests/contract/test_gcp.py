"""What `pulumi up` would create on GCP: every resource of the stacks gcp-dev and gcp-prod, and of stacks that differ from them."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from ipaddress import IPv4Network
from typing import Any

import pytest
import yaml

from infra.gcp import assumed
from infra.preview import Plan, Resource

STACKS = ("gcp-dev", "gcp-prod")
NODE_TAG = "dstack-runner-instance"  # dstack's own
MEGA = {"fleets.0.machine": "a3-megagpu-8g", "fleets.0.capacity": {"kind": "on-demand"}}
A4 = {"fleets.0.machine": "a4-highgpu-8g", "network.zones": ["us-central1-b"]}
HIGH = {"fleets.0.machine": "a3-highgpu-8g", "fleets.0.capacity": {"kind": "on-demand"}}
BASTION = {"access.via": "bastion", "access.allow": ["203.0.113.0/24"]}
FLEX = {"fleets.0.machine": "a4-highgpu-8g", "fleets.0.capacity": {"kind": "flex-start"}, "fleets.0.image": ...}
# By name: the stack that each starts from, and what is changed.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dev": ("gcp-dev", {}),
    "prod": ("gcp-prod", {}),
    "tcpxo by dstack": ("gcp-dev", MEGA),
    "tcpx by dstack": ("gcp-dev", HIGH),
    "roce by dstack": ("gcp-dev", A4),
    "tcpxo by pulumi, bastion": ("gcp-prod", MEGA | BASTION | {"fleets.0.image": ...}),
    "flex-start": ("gcp-prod", FLEX),
    "share": ("gcp-prod", {"checkpoints": {"kind": "filestore", "size": "2TB"}}),
    "regional share": ("gcp-dev", {"checkpoints": {"kind": "filestore", "size": "1TB"}}),
    "disk": ("gcp-prod", {"checkpoints": {"kind": "hyperdisk-ml", "size": "1TB"}, "fleets.0.nodes": 1}),
    "existing network": ("gcp-dev", {"network": {"vpc": "mine", "subnets": ["nodes"]}}),
    "shared pool": ("gcp-prod", {"ci.provider": "projects/1/locations/global/workloadIdentityPools/github"}),
}


@pytest.fixture(scope="module")
def made() -> dict[str, Plan]:
    return {}


@pytest.fixture
def variant(changed: Callable[..., Plan], made: dict[str, Plan]) -> Callable[[str], Plan]:
    """The plan of a variant by its name, each made once."""
    return lambda name: made.get(name) or made.setdefault(name, changed(*VARIANTS[name]))


def every(*names: str):
    return pytest.mark.parametrize("name", names or VARIANTS)


def of(plan: Plan, word: str) -> list[Resource]:
    """The resources of a kind, such as Subnetwork; no components."""
    return [one for one in plan.resources if one.kind == word and not one.component]


def on_gcp(plan: Plan) -> list[Resource]:
    return [one for one in plan.resources if one.type.startswith("gcp:")]


def backend(plan: Plan) -> dict[str, Any]:
    [config] = [one.inputs["text"] for one in of(plan, "File") if one.name == "server-config.yml"]
    [found] = yaml.safe_load(config)["projects"][0]["backends"]
    return found


def values(value: Any) -> Iterator[Any]:
    """Everything that stands in a resource's inputs: keys with their values, at any depth."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield key, item
            yield from values(item)
    elif isinstance(value, list):
        for item in value:
            yield from values(item)


# All resources


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        (
            "dev",
            "2*Account Bucket BucketIAMMember 2*Firewall IAMCustomRole 3*IAMMember Network Router RouterNat 6*Service Subnetwork",
        ),
        (
            "prod",
            "3*Account 2*AccountIamMember Bucket BucketIAMMember 2*Budget CryptoKey CryptoKeyIAMMember 3*Firewall 19*IAMMember "
            "4*InstanceFromTemplate InstanceTemplate KeyRing 3*Network NotificationChannel Router RouterNat 12*Service 10*Subnetwork "
            "WorkloadIdentityPool WorkloadIdentityPoolProvider",
        ),
    ],
)
def test_the_stack_is_made_of_these(name, counts, variant):
    wanted = Counter({word.split("*")[-1]: int(word.split("*")[0]) if "*" in word else 1 for word in counts.split()})
    found = Counter(one.kind for one in on_gcp(variant(name)))
    found["Budget"] += 1 if found["Budget"] else 0  # its notification channel aside, a budget is one resource
    wanted["Budget"] = found["Budget"]
    assert +found == +wanted


@every()
def test_every_resource_is_in_a_component(name, variant):
    plan = variant(name)
    components = {one.urn for one in plan.resources if one.component}
    assert len(on_gcp(plan)) > 15
    for one in on_gcp(plan):
        assert one.parent in components, one.name


@every()
def test_every_resource_is_made_by_a_provider_of_the_stack_and_what_takes_labels_has_them(name, variant):
    """A template is without, as labels would replace it and with it the nodes; so are the services, which take none."""
    plan = variant(name)
    providers = {f"{one.urn}::{one.id}": one for one in plan.resources if one.type == "pulumi:providers:gcp"}
    for one in on_gcp(plan):
        provider = providers[one.options["provider"]]
        labelled = "default_labels" in provider.inputs or "defaultLabels" in provider.inputs
        assert labelled == (one.kind not in ("InstanceTemplate", "Service")), one.name


@every(*STACKS)
def test_the_labels_say_whose_it_is(name, planned):
    [labels] = [one.inputs["defaultLabels"] for one in planned(name).resources if "defaultLabels" in one.inputs]
    settings = yaml.safe_load(labels)
    assert settings.items() >= {"project": "flotilla", "stack": name, "environment": name.removeprefix("gcp-")}.items()
    assert settings["cost-center"] == "research"


@every()
def test_nothing_is_made_before_the_apis_are_on(name, variant):
    plan = variant(name)
    on = {one.urn for one in of(plan, "Service")}
    [labelled] = [one for one in plan.resources if one.type == "pulumi:providers:gcp" and "defaultLabels" in one.inputs]
    assert on <= set(labelled.options["dependencies"])
    assert {"compute.googleapis.com", "iam.googleapis.com"} <= {one.inputs["service"] for one in of(plan, "Service")}
    assert not any(one.inputs["disableOnDestroy"] for one in of(plan, "Service"))  # others in the project may use them


KEPT = ("Bucket", "KeyRing", "CryptoKey")


@every(*STACKS)
def test_production_keeps_its_checkpoints_and_their_key(name, planned):
    production = name == "gcp-prod"
    for one in planned(name).resources:
        kept = production and one.kind in KEPT and not one.component
        assert bool(one.options.get("protect")) == bool(one.options.get("retainOnDelete")) == kept, one.name
        assert (one.inputs.get("deletionPolicy") == "PREVENT") == (kept and one.kind != "KeyRing"), one.name  # a ring has none
    [bucket] = of(planned(name), "Bucket")
    assert bucket.inputs["forceDestroy"] != production


@every("share", "disk")
def test_production_keeps_other_stores_too(name, variant):
    [store] = [one for one in on_gcp(variant(name)) if one.type in ("gcp:filestore/instance:Instance", "gcp:compute/disk:Disk")]
    assert (store.options["protect"], store.options["retainOnDelete"], store.inputs["deletionPolicy"]) == (True, True, "PREVENT")


@every()
def test_only_a_bastion_has_a_public_address(name, variant):
    with_one = [one for one in on_gcp(variant(name)) if any(key == "accessConfigs" and item for key, item in values(one.inputs))]
    assert [one.name.rpartition("-")[2] for one in with_one] == ["bastion"] * ("bastion" in name)


@every()
def test_nobody_is_let_in_from_anywhere(name, variant):
    rules = of(variant(name), "Firewall")
    assert rules
    for rule in rules:
        assert rule.inputs["direction"] == "INGRESS"
        for whence in rule.inputs["sourceRanges"]:
            assert IPv4Network(whence).is_private or whence in ("35.235.240.0/20", "203.0.113.0/24"), rule.name


@every()
def test_names_fit_what_gcp_takes(name, variant):
    """Pulumi puts a dash and seven characters behind the names of those that have none of their own."""
    for one in on_gcp(variant(name)):
        if one.type.startswith("gcp:compute/") and "name" not in one.inputs:
            assert re.fullmatch(r"[a-z][a-z0-9-]{0,54}", one.name), one.name
        if "accountId" in one.inputs:
            assert re.fullmatch(r"[a-z][a-z0-9-]{4,28}[a-z0-9]", one.inputs["accountId"])
        if "roleId" in one.inputs:
            assert re.fullmatch(r"[a-zA-Z0-9_.]{3,64}", one.inputs["roleId"])
        for key in ("workloadIdentityPoolId", "workloadIdentityPoolProviderId"):
            assert re.fullmatch(r"(?!gcp-)[a-z0-9-]{4,32}", one.inputs.get(key, "none"))


def test_two_plans_of_a_stack_are_equal(variant, planned):
    assert on_gcp(variant("prod")) == on_gcp(planned("gcp-prod"))


def test_another_label_touches_no_node(changed, planned):
    """Neither the template, whose change replaces them, nor what is made of it."""
    kinds = ("InstanceTemplate", "InstanceFromTemplate")
    after = changed("gcp-prod", {"tags.team": "vision"})
    for kind in kinds:
        assert of(planned("gcp-prod"), kind)
        assert [one.inputs for one in of(planned("gcp-prod"), kind)] == [one.inputs for one in of(after, kind)]


# Network and fabric


@every("dev", "tcpxo by dstack", "tcpx by dstack", "roce by dstack", "tcpxo by pulumi, bastion", "prod")
def test_subnets_lie_apart_and_reach_the_network_settings(name, variant):
    plan = variant(name)
    subnets = [IPv4Network(one.inputs["ipCidrRange"]) for one in of(plan, "Subnetwork")]
    whole = IPv4Network("10.64.0.0/16" if VARIANTS[name][0] == "gcp-prod" else "10.65.0.0/16")
    assert all(subnet.subnet_of(whole) for subnet in subnets)
    assert not any(one.overlaps(other) for index, one in enumerate(subnets) for other in subnets[:index])


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
def test_a_fabric_has_its_networks(name, vpcs, rdma, mtu, variant):
    plan = variant(name)
    networks = of(plan, "Network")
    roce = [one for one in networks if "networkProfile" in one.inputs]
    assert (len(networks), len(roce)) == (1 + vpcs + bool(rdma), bool(rdma))
    assert {one.inputs["mtu"] for one in networks} == {mtu}
    assert {one.inputs["autoCreateSubnetworks"] for one in networks} == {False}
    assert len(of(plan, "Subnetwork")) == 1 + vpcs + rdma
    for one in roce:
        assert one.inputs["networkProfile"].endswith(
            ("/networkProfiles/us-central1-b-vpc-roce", "/networkProfiles/europe-west1-b-vpc-roce")
        )
        assert not [rule for rule in of(plan, "Firewall") if rule.inputs["network"] == one.name]  # the profile brings its own
        assert sum(subnet.inputs["network"] == one.id for subnet in of(plan, "Subnetwork")) == rdma


def test_nodes_reach_the_internet_by_nat_and_google_without(planned):
    [subnet], [nat], [router] = (of(planned("gcp-dev"), kind) for kind in ("Subnetwork", "RouterNat", "Router"))
    assert subnet.inputs["privateIpGoogleAccess"] is True
    assert nat.inputs["router"] == router.name
    assert [one["name"] for one in nat.inputs["subnetworks"]] == [subnet.id]


def test_flow_logs_are_kept_where_the_stack_says(planned):
    assert [("logConfig" in one.inputs) for one in of(planned("gcp-dev"), "Subnetwork")] == [False]
    assert sum("logConfig" in one.inputs for one in of(planned("gcp-prod"), "Subnetwork")) == 1  # of the nodes; not of the fabric


# Identity


def test_the_server_may_act_as_the_nodes_and_as_nobody_else(planned):
    plan = planned("gcp-dev")
    [grant] = [one for one in of(plan, "IAMMember") if one.inputs["role"] == "roles/iam.serviceAccountUser"]
    assert grant.inputs["serviceAccountId"].endswith("/flotilla-gcp-dev-nodes@my-project-id.iam.gserviceaccount.com")
    assert grant.inputs["member"] == "serviceAccount:flotilla-gcp-dev-dstack@my-project-id.iam.gserviceaccount.com"


def test_there_is_no_server_account_where_pulumi_launches_all(planned):
    assert not [one for one in on_gcp(planned("gcp-prod")) if "dstack" in one.name]


@every()
def test_no_role_is_owner_or_editor_and_no_account_has_a_key(name, variant):
    plan = variant(name)
    roles = [one.inputs["role"] for one in on_gcp(plan) if "role" in one.inputs]
    assert roles
    assert not {"roles/owner", "roles/editor"} & set(roles)
    assert not of(plan, "Key")


def test_nodes_write_metrics_where_the_stack_says(planned):
    wanted = {"roles/logging.logWriter", "roles/monitoring.metricWriter"}
    for name, told in (("gcp-dev", False), ("gcp-prod", True)):
        roles = {one.inputs["role"] for one in of(planned(name), "IAMMember") if "nodes" in one.inputs["member"]}
        assert (wanted <= roles) == told


@every("prod", "shared pool")
def test_github_deploys_from_one_environment_of_one_repository(name, variant):
    plan = variant(name)
    trusted = {one.inputs["member"] for one in of(plan, "IAMMember") if one.inputs["role"] == "roles/iam.workloadIdentityUser"}
    pool = "github" if name == "shared pool" else "github-flotilla-gcp-prod"
    number = "1" if name == "shared pool" else "123456789012"
    subject = (
        f"principal://iam.googleapis.com/projects/{number}/locations/global/workloadIdentityPools/{pool}/subject/repo:example/flotilla:"
    )
    assert trusted == {subject + "environment:prod", subject + "pull_request", subject + "ref:refs/heads/main"}
    conditions = [one.inputs["attributeCondition"] for one in of(plan, "WorkloadIdentityPoolProvider")]
    assert conditions == ["assertion.repository == 'example/flotilla'"] * (name == "prod")
    assert plan.outputs["cloud"]["deploy_provider"].endswith(f"/workloadIdentityPools/{pool}/providers/github")


def test_a_pull_request_reads_alone(planned):
    roles = {one.inputs["role"] for one in of(planned("gcp-prod"), "IAMMember") if "-preview@" in one.inputs["member"]}
    assert roles == {"roles/viewer", "roles/iam.securityReviewer"}


def test_deployments_grant_the_stacks_roles_alone(planned):
    [grant] = [one for one in of(planned("gcp-prod"), "IAMMember") if one.inputs["role"] == "roles/resourcemanager.projectIamAdmin"]
    expression = grant.inputs["condition"]["expression"]
    assert expression == (
        "api.getAttribute('iam.googleapis.com/modifiedGrantsByRole', []).hasOnly("
        "['roles/artifactregistry.reader', 'roles/logging.logWriter', 'roles/monitoring.metricWriter'])"
    )


# Storage, budget


@every("dev", "prod")
def test_the_bucket_is_private_and_keeps_what_is_deleted(name, variant):
    [bucket], [grant] = of(variant(name), "Bucket"), of(variant(name), "BucketIAMMember")
    assert bucket.inputs["uniformBucketLevelAccess"] is True
    assert bucket.inputs["publicAccessPrevention"] == "enforced"
    assert bucket.inputs["hierarchicalNamespace"] == {"enabled": True}
    assert bucket.inputs["softDeletePolicy"] == {"retentionDurationSeconds": (7 if name == "dev" else 30) * 86400}
    assert {rule["action"]["type"] for rule in bucket.inputs["lifecycleRules"]} == {"AbortIncompleteMultipartUpload", "SetStorageClass"}
    assert "versioning" not in bucket.inputs  # refused together with a hierarchical namespace
    assert grant.inputs["role"] == "roles/storage.objectUser"
    assert "-nodes@" in grant.inputs["member"]


def test_the_key_of_production_is_granted_before_the_bucket_uses_it(planned):
    plan = planned("gcp-prod")
    [bucket], [key], [grant] = (of(plan, kind) for kind in ("Bucket", "CryptoKey", "CryptoKeyIAMMember"))
    assert bucket.inputs["encryption"] == {"defaultKmsKeyName": key.id}
    assert grant.urn in bucket.options["dependencies"]
    assert grant.inputs["member"].endswith("@gs-project-accounts.iam.gserviceaccount.com")


@pytest.mark.parametrize(
    ("name", "tier", "where", "size"), [("share", "ZONAL", "europe-west1-b", 2048), ("regional share", "REGIONAL", "us-central1", 1024)]
)
def test_a_share_is_for_the_nodes_alone(name, tier, where, size, variant):
    plan = variant(name)
    [share] = [one for one in on_gcp(plan) if one.type.startswith("gcp:filestore")]
    assert (share.inputs["tier"], share.inputs["location"], share.inputs["fileShares"]["capacityGb"]) == (tier, where, size)
    nodes = next(one for one in of(plan, "Subnetwork") if one.name == f"flotilla-{plan.stack}")
    assert share.inputs["fileShares"]["nfsExportOptions"][0]["ipRanges"] == [nodes.inputs["ipCidrRange"]]
    assert share.inputs["deletionProtectionEnabled"] == (name == "share")


@pytest.mark.parametrize(
    ("name", "mounts"),
    [
        ("dev", "gcsfuse -o allow_other --file-mode 666 --dir-mode 777 flotilla-gcp-dev-checkpoints /checkpoints"),
        ("regional share", "mount -t nfs -o vers=3,hard,noatime,nconnect=8 10.64.255.2:/checkpoints /checkpoints"),
    ],
)
def test_where_dstack_launches_the_task_mounts_the_store(name, mounts, variant):
    [text] = [one.inputs["text"] for one in of(variant(name), "File") if one.name == "ray-cluster.dstack.yml"]
    task = yaml.safe_load(text)
    assert any(mounts in line for line in task["commands"])
    assert task["privileged"] is True
    assert "volumes" not in task


def test_a_budget_tells_at_each_threshold(planned):
    [budget], [channel] = (
        [one for one in of(planned("gcp-prod"), kind) if one.type.startswith("gcp:")] for kind in ("Budget", "NotificationChannel")
    )
    assert budget.inputs["amount"]["specifiedAmount"] == {"currencyCode": "USD", "units": "250000", "nanos": 0}
    assert [rule["thresholdPercent"] for rule in budget.inputs["thresholdRules"]] == [0.5, 0.8, 1.0]
    assert budget.inputs["budgetFilter"]["projects"] == ["projects/123456789012"]
    assert budget.inputs["allUpdatesRule"]["monitoringNotificationChannels"] == [channel.id]
    assert channel.inputs["labels"] == {"email_address": "you@example.com"}


# Nodes


@pytest.mark.parametrize(
    ("name", "nics"),
    [
        ("prod", ["GVNIC"] * 2 + ["MRDMA"] * 8),
        ("tcpxo by pulumi, bastion", ["GVNIC"] * 9),
        ("flex-start", ["GVNIC"] * 2 + ["MRDMA"] * 8),
        ("disk", ["GVNIC"]),
    ],
)
def test_a_node_has_all_interfaces_of_its_fabric_each_in_a_subnet_of_its_own(name, nics, variant):
    [template] = of(variant(name), "InstanceTemplate")
    found = template.inputs["networkInterfaces"]
    assert [one["nicType"] for one in found] == nics
    assert len({one["subnetwork"] for one in found}) == len(nics)
    assert found[0]["subnetwork"] == f"subnetworks/flotilla-{VARIANTS[name][0]}"  # the main one first: it has the node's address


def script(plan: Plan) -> str:
    [template] = of(plan, "InstanceTemplate")
    return template.inputs["metadata"]["startup-script"]


@every("prod", "tcpxo by pulumi, bastion", "flex-start", "share", "disk")
def test_a_node_is_shielded_and_people_come_in_by_os_login(name, variant):
    [template] = of(variant(name), "InstanceTemplate")
    shield = template.inputs["shieldedInstanceConfig"]
    assert (shield["enableVtpm"], shield["enableIntegrityMonitoring"]) == (True, True)
    metadata = template.inputs["metadata"]
    assert (metadata["enable-oslogin"], metadata["block-project-ssh-keys"], metadata["serial-port-enable"]) == ("TRUE", "TRUE", "FALSE")
    assert template.inputs["tags"] == [NODE_TAG]  # what the firewall lets talk
    assert template.inputs["serviceAccount"]["email"].startswith("flotilla-gcp-prod-nodes@")
    done = subprocess.run(["bash", "-n"], input=script(variant(name)), text=True, capture_output=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("name", "line"), [("prod", "gcsfuse "), ("share", "mount -t nfs "), ("disk", "mkfs.xfs /dev/disk/by-id/google-checkpoints")]
)
def test_nodes_mount_the_store_where_the_task_finds_it(name, line, variant):
    plan = variant(name)
    assert line in script(plan)
    assert "/var/lib/flotilla/checkpoints" in script(plan)
    [text] = [one.inputs["text"] for one in of(plan, "File") if one.name == "ray-cluster.dstack.yml"]
    assert yaml.safe_load(text)["volumes"] == ["/var/lib/flotilla/checkpoints:/checkpoints"]


def test_the_disk_is_attached_under_the_name_that_the_script_mounts(variant):
    [node], [disk] = of(variant("disk"), "InstanceFromTemplate"), of(variant("disk"), "Disk")
    [attached] = node.inputs["attachedDisks"]
    assert attached["deviceName"] == "checkpoints"
    assert attached["source"].endswith(disk.name)
    assert (disk.inputs["type"], disk.inputs["size"], disk.inputs["zone"]) == ("hyperdisk-ml", 1024, node.inputs["zone"])


def test_every_node_is_in_the_fleet_by_its_own_address(planned):
    plan = planned("gcp-prod")
    nodes = of(plan, "InstanceFromTemplate")
    assert [one.inputs["zone"] for one in nodes] == ["europe-west1-b"] * 4
    assert all(one.options["deleteBeforeReplace"] for one in nodes)  # there is no capacity for a second beside it
    [text] = [one.inputs["text"] for one in of(plan, "File") if one.name == "h200.fleet.dstack.yml"]
    assert len(set(yaml.safe_load(text)["ssh_config"]["hosts"])) == 4


def test_a_fabric_stands_side_by_side_unless_a_reservation_says_where(variant):
    [policy] = of(variant("tcpxo by pulumi, bastion"), "ResourcePolicy")
    [template] = of(variant("tcpxo by pulumi, bastion"), "InstanceTemplate")
    assert policy.inputs["groupPlacementPolicy"] == {"collocation": "COLLOCATED"}
    assert template.inputs["resourcePolicies"].endswith(policy.name)
    assert not of(variant("prod"), "ResourcePolicy")


def test_flex_start_asks_for_all_machines_at_once_and_waits(variant):
    plan = variant("flex-start")
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
    empty = assumed.answer

    def answer(token: str, arguments: dict[str, Any]) -> tuple[dict[str, Any], str]:
        if token.endswith(":getInstanceGroup"):
            return arguments | {"instances": ["zones/z/instances/h200-b", "zones/z/instances/h200-a"]}, "granted"
        if token.endswith(":getInstance"):
            name = arguments["selfLink"].rpartition("/")[2]
            return arguments | {"name": name, "networkInterfaces": [{"networkIp": f"10.64.0.{ord(name[-1])}"}]}, "running"
        return empty(token, arguments)

    monkeypatch.setattr(assumed, "answer", answer)
    plan = changed("gcp-prod", FLEX | {"fleets.0.nodes": 2})
    [text] = [one.inputs["text"] for one in of(plan, "File") if one.name == "h200.fleet.dstack.yml"]
    assert yaml.safe_load(text)["ssh_config"]["hosts"] == ["10.64.0.97", "10.64.0.98"]
    assert plan.outputs["next"][0].startswith("gcloud compute start-iap-tunnel h200-a 22 ")


@every("prod", "flex-start", "share")
def test_machines_start_when_they_can_reach_what_they_need(name, variant):
    plan = variant(name)
    needed = {one.urn for kind in ("RouterNat", "BucketIAMMember", "Firewall") for one in of(plan, kind) if "gpu" not in one.name}
    for template in of(plan, "InstanceTemplate"):
        assert needed <= set(template.options["dependencies"])


def test_a_bastion_is_for_those_who_may_and_has_no_account(variant):
    plan = variant("tcpxo by pulumi, bastion")
    [machine_], [rule], [address] = (
        [one for one in of(plan, kind) if one.name.endswith("-bastion")] for kind in ("Instance", "Firewall", "Address")
    )
    assert rule.inputs["sourceRanges"] == ["203.0.113.0/24"]
    assert rule.inputs["targetTags"] == machine_.inputs["tags"] != [NODE_TAG]
    assert "serviceAccount" not in machine_.inputs
    assert machine_.inputs["shieldedInstanceConfig"]["enableSecureBoot"] is True
    assert address.inputs["region"] == "europe-west1"


def test_an_existing_network_gets_rules_alone(variant):
    plan = variant("existing network")
    assert not [one for kind in ("Network", "Subnetwork", "Router", "RouterNat") for one in of(plan, kind)]
    assert {one.inputs["network"] for one in of(plan, "Firewall")} == {"mine"}
    config = backend(plan)
    assert (config["vpc_name"], config["subnetworks"], config["nat_check"]) == ("mine", {"us-central1": "nodes"}, False)
