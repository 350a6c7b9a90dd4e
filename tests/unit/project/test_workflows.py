"""The workflows in .github: who may do what, and when."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from stacks import load

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / ".github/workflows").glob("*.yml"))


def workflow(file: Path) -> dict[str, Any]:
    content = yaml.safe_load(file.read_text())
    return content | {"on": content.pop(True)}  # YAML reads `on` as true


DEPLOY = workflow(ROOT / ".github/workflows/deploy.yml")
JOBS = DEPLOY["jobs"]


def uses(job: dict[str, Any], action: str) -> list[dict[str, Any]]:
    return [step for step in job["steps"] if step.get("uses", "").startswith(f"{action}@")]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_actions_are_pinned_and_jobs_end_by_themselves(file):
    for name, job in workflow(file)["jobs"].items():
        assert job["timeout-minutes"] <= 120, name
        for step in job["steps"]:
            # A tag can be moved to other code by whoever takes over the action's repository; a commit cannot.
            assert re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", step.get("uses", f"a/b@{'0' * 40}")), step
        assert all(step["with"]["persist-credentials"] is False for step in uses(job, "actions/checkout")), name


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_pinned_action_says_its_version(file):
    pinned = [line for line in file.read_text().splitlines() if "uses:" in line]
    assert pinned
    assert all(re.search(r" # v\d+\.\d+\.\d+$", line) for line in pinned)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_jobs_have_the_rights_that_they_use_and_no_more(file):
    content = workflow(file)
    assert content["permissions"] in ({}, {"contents": "read"})
    for name, job in content["jobs"].items():
        rights = job.get("permissions", content["permissions"])
        assert rights.pop("contents") == "read"
        assert rights == ({"id-token": "write"} if uses(job, "pulumi/actions") else {}) | (
            {"pull-requests": "write"} if name == "preview" else {}
        )


def test_no_long_lived_key_is_used():
    text = (ROOT / ".github/workflows/deploy.yml").read_text()
    assert "secrets." not in text and "access-key" not in text and "credentials_json" not in text
    for job in JOBS.values():
        [aws], [gcp] = uses(job, "aws-actions/configure-aws-credentials"), uses(job, "google-github-actions/auth")
        assert aws["with"]["role-to-assume"].startswith("${{ vars.AWS_") and aws["if"] == "matrix.cloud == 'aws'"
        assert gcp["with"]["workload_identity_provider"] == "${{ vars.GCP_DEPLOY_PROVIDER }}" and gcp["if"] == "matrix.cloud == 'gcp'"


def test_each_clouds_stacks_have_a_backend_of_their_own():
    for job in JOBS.values():
        url = job["env"]["PULUMI_BACKEND_URL"]
        clouds = {entry["cloud"] for entry in job["strategy"]["matrix"]["include"]}
        for cloud in clouds:
            variable = f"vars.PULUMI_BACKEND_URL_{cloud.upper()}"
            assert f"matrix.cloud == '{cloud}' && {variable} ||" in url and variable in job["if"]
        assert url.endswith("|| vars.PULUMI_BACKEND_URL }}")


def test_every_stack_that_ci_may_deploy_is_deployed_to_its_environment():
    stacks = [load.load(name, ROOT) for name in load.names(ROOT)]
    wanted = [{"stack": stack.name, "cloud": stack.cloud, "environment": stack.environment} for stack in stacks if stack.ci]
    assert wanted
    for job in JOBS.values():
        assert job["strategy"] == {"fail-fast": False, "matrix": {"include": wanted}}


def test_a_pull_request_of_this_repository_shows_its_plan_and_changes_nothing():
    job = JOBS["preview"]
    assert "github.event_name == 'pull_request'" in job["if"]
    assert "github.event.pull_request.head.repo.full_name == github.repository" in job["if"]
    [pulumi] = uses(job, "pulumi/actions")
    assert (pulumi["with"]["command"], pulumi["with"]["comment-on-pr"]) == ("preview", True)
    assert "environment" not in job  # with one, GitHub's token would be that of a deployment
    assert "PREVIEW" in str(job) and "DEPLOY_ROLE" not in str(job) and "DEPLOY_ACCOUNT" not in str(job)


def test_a_merge_is_deployed_once_per_stack_after_its_environment_approves():
    job = JOBS["up"]
    assert "github.event_name == 'push'" in job["if"] and DEPLOY["on"]["push"]["branches"] == ["main"]
    assert job["environment"] == "${{ matrix.environment }}"
    assert job["concurrency"] == {"group": "pulumi-${{ matrix.stack }}", "cancel-in-progress": False}
    [pulumi] = uses(job, "pulumi/actions")
    assert (pulumi["with"]["command"], pulumi["with"]["policyPacks"]) == ("up", "infra/policy")
    assert "AWS_DEPLOY_ROLE" in str(job) and "GCP_DEPLOY_ACCOUNT" in str(job)


def test_drift_is_looked_for_on_a_schedule_without_the_right_to_change_anything():
    job = JOBS["drift"]
    assert DEPLOY["on"]["schedule"] and "github.event_name == 'schedule'" in job["if"]
    [pulumi] = uses(job, "pulumi/actions")
    assert {key: pulumi["with"][key] for key in ("command", "refresh", "expect-no-changes")} == {
        "command": "preview",
        "refresh": True,
        "expect-no-changes": True,
    }
    assert "environment" not in job and "DEPLOY_ROLE" not in str(job) and "DEPLOY_ACCOUNT" not in str(job)


def test_what_runs_at_the_same_time_never_pushes_an_update_aside():
    groups = {name: job["concurrency"]["group"] for name, job in JOBS.items()}
    assert len(set(groups.values())) == 3 and all("${{ matrix.stack }}" in group for group in groups.values())


def test_a_change_of_anything_that_the_program_reads_is_seen():
    seen = {path.partition("/")[0] for path in DEPLOY["on"]["push"]["paths"]}
    assert {"Pulumi.yaml", "infra", "stacks", "fleets", "cluster_tasks"} <= seen
    assert DEPLOY["on"]["pull_request"]["paths"] == DEPLOY["on"]["push"]["paths"]
