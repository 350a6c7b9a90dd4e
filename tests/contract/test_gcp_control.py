"""The control node of a stack on GCP: who reaches it, what it may do, and what outlives it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from gcp_plans import on_gcp
from plans import of

from infra.preview import Plan

LABEL = "flotilla-gcp-dev-control"
SERVER = "serviceAccount:flotilla-gcp-dev-dstack@my-project-id.iam.gserviceaccount.com"


@pytest.fixture(scope="module")
def made(gcp_plan: Callable[[str], Plan]) -> Plan:
    return gcp_plan("control")


def one(plan: Plan, kind: str, name: str = LABEL) -> dict[str, Any]:
    [found] = [resource for resource in of(plan, kind) if resource.name == name]
    return found.inputs


def test_identity_aware_proxy_alone_comes_in_and_only_to_ssh(made: Plan) -> None:
    node, rule = one(made, "Instance"), one(made, "Firewall")
    assert (rule["sourceRanges"], rule["targetTags"], rule["allows"]) == (
        ["35.235.240.0/20"],
        node["tags"],
        [{"protocol": "tcp", "ports": ["22"]}],
    )
    assert not [other for other in of(made, "Firewall") if set(node["tags"]) & set(other.inputs["targetTags"]) and other.name != LABEL]
    [nic] = node["networkInterfaces"]
    assert "accessConfigs" not in nic


def test_it_is_the_servers_account_which_reads_one_secret(made: Plan) -> None:
    assert f"serviceAccount:{one(made, 'Instance')['serviceAccount']['email']}" == SERVER
    reads = one(made, "SecretIamMember")
    assert (reads["role"], reads["member"]) == ("roles/secretmanager.secretAccessor", SERVER)
    assert reads["secretId"] == one(made, "Secret")["secretId"]
    roles = {
        resource.inputs["role"] for resource in on_gcp(made) if resource.inputs.get("member") == SERVER and "project" in resource.inputs
    }
    assert roles == {"projects/my-project-id/roles/flotilla_gcp_dev_dstack", "roles/secretmanager.secretAccessor"}


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
    assert f"secret=projects/my-project-id/secrets/{LABEL}-token\n" in one(made, "Instance")["metadataStartupScript"]


def test_the_disk_is_apart_and_has_snapshots_and_the_old_machine_goes_first(made: Plan) -> None:
    [attached] = one(made, "Instance")["attachedDisks"]
    [disk] = [resource for resource in of(made, "Disk") if resource.name == LABEL]
    assert attached == {"source": disk.id, "deviceName": "data"}
    assert one(made, "DiskResourcePolicyAttachment")["disk"] == disk.inputs.get("name", LABEL)
    assert one(made, "ResourcePolicy")["snapshotSchedulePolicy"]["retentionPolicy"]["maxRetentionDays"] == 7
    [node] = [resource for resource in of(made, "Instance") if resource.name == LABEL]
    assert node.options["deleteBeforeReplace"] and node.inputs["scheduling"]["automaticRestart"]


def test_the_next_steps_forward_the_server_and_log_in(made: Plan) -> None:
    forward, login, *_ = made.outputs["next"]
    ssh = f"gcloud compute ssh {LABEL} --project my-project-id --zone us-central1-b --tunnel-through-iap --quiet --"
    assert (forward, login) == (f"{ssh} -N -L 3000:127.0.0.1:3000", "python -m fleets.server login gcp-dev")
    assert made.files["ssh_config"].endswith(f'Match final host "10.65.*"\n  ProxyCommand {ssh} -W %h:%p\n')
