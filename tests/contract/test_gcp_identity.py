"""Who may do what on GCP: nodes, the dstack server, deployments from GitHub."""

from __future__ import annotations

import re

import pytest
from support.gcp_plans import every, on_gcp
from support.plans import of

from infra.gcp.deploy import NAMED, named


def test_the_server_may_act_as_the_nodes_and_as_nobody_else(planned):
    plan = planned("gcp-dev")
    [grant] = [resource for resource in of(plan, "IAMMember") if resource.inputs["role"] == "roles/iam.serviceAccountUser"]
    assert grant.inputs["serviceAccountId"].endswith("/flotilla-gcp-dev-nodes@my-project-id.iam.gserviceaccount.com")
    assert grant.inputs["member"] == "serviceAccount:flotilla-gcp-dev-dstack@my-project-id.iam.gserviceaccount.com"


def test_there_is_no_server_account_where_pulumi_launches_all(planned):
    assert not [resource for resource in on_gcp(planned("gcp-prod")) if "dstack" in resource.name]


@every()
def test_no_role_is_owner_or_editor_and_no_account_has_a_key(name, gcp_plan):
    plan = gcp_plan(name)
    roles = [resource.inputs["role"] for resource in on_gcp(plan) if "role" in resource.inputs]
    assert roles
    assert not {"roles/owner", "roles/editor"} & set(roles)
    assert not of(plan, "Key")


def test_nodes_write_metrics_where_the_stack_says(planned):
    wanted = {"roles/logging.logWriter", "roles/monitoring.metricWriter"}
    for name, told in (("gcp-dev", False), ("gcp-prod", True)):
        roles = {resource.inputs["role"] for resource in of(planned(name), "IAMMember") if "nodes" in resource.inputs["member"]}
        assert (wanted <= roles) == told


@every("prod", "shared pool")
def test_github_deploys_from_one_environment_of_one_repository(name, gcp_plan):
    plan = gcp_plan(name)
    trusted = {
        resource.inputs["member"] for resource in of(plan, "IAMMember") if resource.inputs["role"] == "roles/iam.workloadIdentityUser"
    }
    pool = "github" if name == "shared pool" else "github-flotilla-gcp-prod"
    number = "1" if name == "shared pool" else "123456789012"
    subject = (
        f"principal://iam.googleapis.com/projects/{number}/locations/global/workloadIdentityPools/{pool}/subject/repo:example/flotilla:"
    )
    assert trusted == {subject + "environment:prod", subject + "pull_request", subject + "ref:refs/heads/main"}
    conditions = [resource.inputs["attributeCondition"] for resource in of(plan, "WorkloadIdentityPoolProvider")]
    assert conditions == ["assertion.repository == 'example/flotilla'"] * (name == "prod")
    assert plan.outputs["cloud"]["deploy_provider"].endswith(f"/workloadIdentityPools/{pool}/providers/github")


def test_a_pull_request_reads_alone(planned):
    members = [resource for resource in of(planned("gcp-prod"), "IAMMember") if "-preview@" in resource.inputs["member"]]
    assert {member.inputs["role"] for member in members if not member.inputs.get("condition")} == {
        "roles/viewer",
        "roles/iam.securityReviewer",
    }
    on_state = {"roles/storage.objectViewer", "roles/cloudkms.cryptoKeyDecrypter"}
    assert {member.inputs["role"] for member in members if member.inputs.get("condition")} == on_state


@pytest.mark.parametrize("role", ["preview", "up"])
def test_pulumis_state_of_this_stack_alone_is_in_the_grants(role, planned):
    members = [resource for resource in of(planned("gcp-prod"), "IAMMember") if f"-{role}@" in resource.inputs["member"]]
    [files] = [member.inputs["condition"]["expression"] for member in members if member.name.endswith("-state")]
    bucket = "projects/_/buckets/flotilla-state-my-project-id/objects/.pulumi/"
    own = (
        "stacks/flotilla/gcp-prod.json",
        "backups/flotilla/gcp-prod/",
        "history/flotilla/gcp-prod/",
        "locks/organization/flotilla/gcp-prod/",
    )
    named = [f"resource.name == '{bucket}meta.yaml'", *(f"resource.name.startsWith('{bucket}{path}')" for path in own)]
    assert files.split(" || ") == named
    [key] = [member.inputs["condition"]["expression"] for member in members if member.name.endswith("-state-key")]
    assert key == "resource.name == 'projects/my-project-id/locations/europe-west1/keyRings/flotilla/cryptoKeys/state'"


def test_deployments_grant_the_stacks_roles_alone(planned):
    [grant] = [
        resource for resource in of(planned("gcp-prod"), "IAMMember") if resource.inputs["role"] == "roles/resourcemanager.projectIamAdmin"
    ]
    expression = grant.inputs["condition"]["expression"]
    assert expression == (
        "api.getAttribute('iam.googleapis.com/modifiedGrantsByRole', []).hasOnly("
        "['roles/artifactregistry.reader', 'roles/logging.logWriter', 'roles/monitoring.metricWriter'])"
    )


@every("prod", "control by pulumi")
def test_who_deploys_has_no_way_to_raise_himself(name, gcp_plan):
    """What the account may do itself, and roles that may be changed and then given, are made by a person."""
    grants = [one for one in on_gcp(gcp_plan(name)) if "-up@" in str(one.inputs.get("member"))]
    everywhere = {
        one.inputs["role"] for one in grants if one.kind == "IAMMember" and "projects" in one.type and not one.inputs.get("condition")
    }
    assert everywhere == {
        *("roles/viewer", "roles/iam.securityReviewer", "roles/file.editor"),
        *("roles/monitoring.notificationChannelEditor", "roles/serviceusage.serviceUsageAdmin"),
    }
    [grant] = [one for one in grants if one.inputs["role"] == "roles/resourcemanager.projectIamAdmin"]
    assert "projects/" not in grant.inputs["condition"]["expression"]


@pytest.mark.parametrize(
    ("role", "own", "others"),
    [
        (
            "storage.admin",
            "projects/_/buckets/flotilla-gcp-prod-checkpoints-1a2b3c4/objects/x",
            ("projects/_/buckets/flotilla-state-my-project-id", "projects/_/buckets/flotilla-gcp-dev-x", "projects/_/buckets/theirs"),
        ),
        (
            "cloudkms.admin",
            "projects/my-project-id/locations/europe-west1/keyRings/flotilla-gcp-prod-1a2b3c4/cryptoKeys/x",
            ("projects/my-project-id/locations/europe-west1/keyRings/flotilla/cryptoKeys/state",),
        ),
    ],
)
def test_who_deploys_changes_buckets_and_keys_of_the_stack_alone(role, own, others, planned):
    [grant] = [one for one in of(planned("gcp-prod"), "IAMMember") if one.inputs["role"] == f"roles/{role}"]
    making, *names = grant.inputs["condition"]["expression"].split(" || ")
    assert making == "resource.type == 'cloudresourcemanager.googleapis.com/Project'"
    prefixes = [name.split("'")[1] for name in names if ".startsWith(" in name]
    assert any(own.startswith(prefix) for prefix in prefixes)
    assert not [other for other in others if any(other.startswith(prefix) for prefix in prefixes)]


@pytest.mark.parametrize("stack", ["gcp-prod", "gcp-dev"])
def test_who_deploys_changes_machines_with_names_of_the_stack_alone(stack, planned):
    """As Google's conditions do, which ask other kinds of resources for no name."""

    def allowed(kind: str, path: str) -> bool:
        clause = r"resource\.type != '([^']+)' \|\| resource\.name\.extract\('([^']+)\{name\}'\)\.startsWith\('([^']+)'\)"
        clauses = re.findall(clause, expression)
        assert len(clauses) == 3
        return all(f"compute.googleapis.com/{kind}" != each or path.partition(before)[2].startswith(own) for each, before, own in clauses)

    expression = named(stack)
    at = "projects/my-project-id/zones/europe-west1-b"
    assert not allowed("Instance", f"{at}/instances/theirs") and not allowed("Disk", f"{at}/disks/flotilla-other-x")
    assert not allowed("InstanceTemplate", "projects/my-project-id/global/instanceTemplates/theirs")
    assert allowed("Network", "projects/my-project-id/global/networks/theirs")
    made = [one for one in planned(stack).resources if one.type.startswith("gcp:compute/")]
    kinds = {"InstanceFromTemplate": "Instance", "Instance": "Instance", "Disk": "Disk", "InstanceTemplate": "InstanceTemplate"}
    ours = [(kinds[one.kind], one.inputs.get("name") or f"{one.name}-1a2b3c4") for one in made if one.kind in kinds]
    assert ours and all(allowed(kind, f"{at}/{NAMED[kind]}/{name}") for kind, name in ours)
