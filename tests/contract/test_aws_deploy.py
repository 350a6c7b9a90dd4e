"""Who may deploy to AWS from GitHub, and what a deployment may make."""

from __future__ import annotations

import json
import re

import pytest
from aws_plans import policy
from plans import of


@pytest.mark.parametrize(("role", "subjects"), [("deploy", ["environment:prod"]), ("preview", ["pull_request", "ref:refs/heads/main"])])
def test_one_environment_of_one_repository_may_deploy_and_its_pull_requests_may_preview(role, subjects, planned):
    [found] = [resource for resource in of(planned("aws-prod"), "Role") if resource.name.endswith(f"-{role}")]
    [statement] = json.loads(found.inputs["assumeRolePolicy"])["Statement"]
    assert statement["Condition"] == {
        "StringEquals": {
            "token.actions.githubusercontent.com:aud": "sts.amazonaws.com",
            "token.actions.githubusercontent.com:sub": [f"repo:example/flotilla:{subject}" for subject in subjects],
        }
    }
    assert planned("aws-prod").outputs["cloud"][f"{role}_role"] == f"arn:aws:iam::123456789012:role/{found.name}"


def test_a_preview_only_looks(planned):
    actions = [
        action for statement in policy(planned("aws-prod"), "flotilla-aws-prod-preview")["Statement"] for action in statement["Action"]
    ]
    assert all(re.fullmatch(r"ec2:Describe\w+|ssm:GetParameter", action) for action in actions)


def test_a_provider_that_is_there_is_not_made_again(changed):
    mine = "arn:aws:iam::123456789012:oidc-provider/token.actions.githubusercontent.com"
    plan = changed("aws-prod", {"ci.provider": mine})
    assert not of(plan, "OpenIdConnectProvider")
    role = next(resource for resource in of(plan, "Role") if resource.name.endswith("-deploy"))
    assert json.loads(role.inputs["assumeRolePolicy"])["Statement"][0]["Principal"] == {"Federated": mine}


def test_what_a_deployment_makes_is_bounded(planned):
    plan = planned("aws-prod")
    bounds = [resource for resource in of(plan, "Policy") if resource.name.endswith("-boundary")]
    made = [resource for resource in of(plan, "Role") if not resource.name.endswith(("-deploy", "-preview"))]
    assert {role.inputs["permissionsBoundary"] for role in made} == {f"arn:aws:iam::123456789012:policy/{bounds[0].name}"}
    assert {role.inputs["path"] for role in made} == {"/flotilla/aws-prod/"}


def test_a_deployment_may_end_what_each_way_to_buy_machines_starts(planned):
    """The provider cancels the request of a spot machine that it destroys."""
    actions = {
        action
        for statement in policy(planned("aws-prod"), "flotilla-aws-prod-deploy-network")["Statement"]
        for action in statement["Action"]
    }
    assert {"ec2:RunInstances", "ec2:TerminateInstances", "ec2:CancelSpotInstanceRequests"} <= actions
