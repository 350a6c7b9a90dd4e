"""The control node of a stack on GCP: who reaches it, what it may do, and what outlives it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.gcp_plans import on_gcp
from support.plans import of

from infra.preview import Plan
from stacks.host import forward
from stacks.load import load

ROOT = Path(__file__).parents[2]
LABEL = "flotilla-gcp-dev-control"
SERVER = "serviceAccount:flotilla-gcp-dev-dstack@my-project-id.iam.gserviceaccount.com"


@pytest.fixture(scope="module")
def made(gcp_plan: Callable[[str], Plan]) -> Plan:
    return gcp_plan("dev")


def one(plan: Plan, kind: str, name: str = LABEL) -> dict[str, Any]:
    [found] = [resource for resource in of(plan, kind) if resource.name == name]
    return found.inputs


def test_identity_aware_proxy_and_googles_probes_come_in_and_only_to_ssh(made: Plan) -> None:
    node, rules = one(made, "InstanceTemplate"), [rule for rule in of(made, "Firewall") if rule.name.startswith(LABEL)]
    assert {tuple(rule.inputs["sourceRanges"]) for rule in rules} == {("35.235.240.0/20",), ("35.191.0.0/16", "130.211.0.0/22")}
    for rule in rules:
        assert (rule.inputs["targetTags"], rule.inputs["allows"]) == (node["tags"], [{"protocol": "tcp", "ports": ["22"]}])
    assert not [other for other in of(made, "Firewall") if set(node["tags"]) & set(other.inputs["targetTags"]) and other not in rules]
    [nic] = node["networkInterfaces"]
    assert "accessConfigs" not in nic


def test_a_machine_whose_ssh_does_not_answer_is_made_again_with_its_name_address_and_disk(made: Plan) -> None:
    health, group, machine = one(made, "HealthCheck"), one(made, "InstanceGroupManager"), one(made, "PerInstanceConfig")
    assert health["tcpHealthCheck"] == {"port": 22, "response": "SSH-2.0"}  # a kernel that lives accepts, sshd alone says its name
    [check] = [resource.id for resource in of(made, "HealthCheck")]
    assert group["autoHealingPolicies"] == {"healthCheck": check, "initialDelaySec": 300}
    assert group["updatePolicy"]["replacementMethod"] == "RECREATE" and group["updatePolicy"]["maxSurgeFixed"] == 0
    assert "targetSize" not in group  # the machine below counts
    assert machine["name"] == LABEL and machine["removeInstanceOnDestroy"]
    [nic] = one(made, "InstanceTemplate")["networkInterfaces"]
    assert one(made, "Address")["addressType"] == "INTERNAL" and nic["networkIp"]


def test_it_is_the_servers_account_which_reads_one_secret(made: Plan) -> None:
    assert f"serviceAccount:{one(made, 'InstanceTemplate')['serviceAccount']['email']}" == SERVER
    reads = one(made, "SecretIamMember")
    assert (reads["role"], reads["member"]) == ("roles/secretmanager.secretAccessor", SERVER)
    assert reads["secretId"] == one(made, "Secret")["secretId"]
    roles = {
        resource.inputs["role"] for resource in on_gcp(made) if resource.inputs.get("member") == SERVER and "project" in resource.inputs
    }
    assert roles == {"projects/my-project-id/roles/flotilla_gcp_dev_dstack", "roles/secretmanager.secretAccessor"}


def test_who_deploys_may_act_as_its_account_and_reach_its_ssh_and_who_previews_may_not(gcp_plan: Callable[[str], Plan]) -> None:
    plan = gcp_plan("control by pulumi")
    up = "serviceAccount:flotilla-gcp-prod-up@my-project-id.iam.gserviceaccount.com"
    [way] = [resource.inputs for resource in on_gcp(plan) if resource.inputs.get("role") == "roles/iap.tunnelResourceAccessor"]
    [nic] = one(plan, "InstanceTemplate", "flotilla-gcp-prod-control")["networkInterfaces"]
    assert (way["member"], way["condition"]["expression"]) == (up, f"destination.ip == '{nic['networkIp']}' && destination.port == 22")
    account = "projects/my-project-id/serviceAccounts/flotilla-gcp-prod-control@my-project-id.iam.gserviceaccount.com"
    users = [resource.inputs["member"] for resource in of(plan, "IAMMember") if resource.inputs.get("serviceAccountId") == account]
    assert users == [up]


def test_where_its_server_launches_no_machines_its_account_has_no_other_right(gcp_plan: Callable[[str], Plan]) -> None:
    plan = gcp_plan("control by pulumi")
    member = "serviceAccount:flotilla-gcp-prod-control@my-project-id.iam.gserviceaccount.com"
    assert [resource.kind for resource in on_gcp(plan) if resource.inputs.get("member") == member] == ["SecretIamMember"]
    [disk] = [resource for resource in of(plan, "Disk") if resource.name.endswith("-control")]
    assert disk.inputs["createSnapshotBeforeDestroy"] and disk.options["protect"] and disk.options["retainOnDelete"]
    readers = {resource.inputs["member"].partition("@")[0] for resource in of(plan, "SecretIamMember")}
    assert {reader.rpartition("-")[2] for reader in readers} == {"control", "up", "preview"}


def test_the_token_is_in_the_secret_and_not_in_the_startup_script(made: Plan) -> None:
    assert made.outputs["server_token"] == "[secret]"
    assert one(made, "SecretVersion")["secretData"] == "[secret]"
    assert f"secret=projects/my-project-id/secrets/{LABEL}-token\n" in one(made, "InstanceTemplate")["metadataStartupScript"]


def test_the_disk_is_apart_stays_and_has_snapshots(made: Plan) -> None:
    [disk] = [resource for resource in of(made, "Disk") if resource.name == LABEL]
    [attached] = one(made, "PerInstanceConfig")["preservedState"]["disks"]
    assert attached == {"source": disk.id, "deviceName": "data", "deleteRule": "NEVER"}
    assert one(made, "DiskResourcePolicyAttachment")["disk"] == disk.inputs.get("name", LABEL)
    assert one(made, "ResourcePolicy")["snapshotSchedulePolicy"]["retentionPolicy"]["maxRetentionDays"] == 7


def test_the_next_steps_forward_the_server_and_log_in(made: Plan) -> None:
    assert made.outputs["next"][:2] == ["flotilla server forward gcp-dev", "flotilla server login gcp-dev"]
    through = f"gcloud compute ssh {LABEL} --project my-project-id --zone us-central1-b --tunnel-through-iap --quiet --"
    assert made.files["ssh_config"].endswith(f'Match final host "10.65.*"\n  ProxyCommand {through} -W %h:%p\n')
    assert forward.line(load("gcp-dev", ROOT)) == f"{through} -N -o ServerAliveInterval=30 -L 3000:127.0.0.1:3000"
