"""What `pulumi up` would create on AWS: all of the stacks aws-dev and aws-prod; test_aws_*.py take it by subject."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from support.aws_plans import on_aws
from support.plans import of

STACKS = ("aws-dev", "aws-prod")


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        (
            "aws-dev",
            "Bucket BucketLifecycleConfiguration BucketOwnershipControls BucketPolicy BucketPublicAccessBlock BucketVersioning Budget "
            "BucketServerSideEncryptionConfiguration DefaultSecurityGroup Eip 2*InstanceProfile InternetGateway Key NatGateway Policy "
            "3*Role 5*RolePolicy 2*Route 2*RouteTable 6*RouteTableAssociation 2*SecurityGroup 3*SecurityGroupEgressRule "
            "2*SecurityGroupIngressRule 6*Subnet Vpc VpcEndpoint "
            "Instance LifecyclePolicy MetricAlarm Parameter RolePolicyAttachment Volume VolumeAttachment",  # the control node
        ),
        (
            "aws-prod",
            "Bucket BucketLifecycleConfiguration BucketOwnershipControls BucketPolicy BucketPublicAccessBlock BucketVersioning Budget "
            "BucketServerSideEncryptionConfiguration DefaultSecurityGroup Eip 2*InstanceProfile InternetGateway Key NatGateway 5*Policy "
            "5*Role 5*RolePolicy 4*RolePolicyAttachment 2*Route 2*RouteTable 2*RouteTableAssociation 3*SecurityGroup "
            "5*SecurityGroupEgressRule "
            "8*SecurityGroupIngressRule 2*Subnet Vpc VpcEndpoint DataRepositoryAssociation EncryptionByDefault FlowLog 5*Instance "
            "InstanceMetadataDefaults KeyPair "
            "KeyPolicy LaunchTemplate 2*LogGroup LustreFileSystem OpenIdConnectProvider",
        ),
    ],
)
def test_the_stack_is_made_of_these(name, counts, planned):
    wanted = Counter({word.split("*")[-1]: int(word.split("*")[0]) if "*" in word else 1 for word in counts.split()})
    assert Counter(resource.kind for resource in on_aws(planned(name))) == wanted


@pytest.mark.parametrize("name", STACKS)
def test_every_resource_is_in_a_component_and_made_by_the_stacks_provider(name, planned):
    plan = planned(name)
    components = {resource.urn for resource in plan.resources if resource.component}
    [provider] = [resource for resource in plan.resources if resource.type == "pulumi:providers:aws"]
    for resource in on_aws(plan):
        assert resource.parent in components, resource.name
        assert resource.options["provider"] == f"{provider.urn}::{provider.id}", resource.name


def test_the_provider_tags_what_it_makes(planned):
    [provider] = of(planned("aws-prod"), "aws")
    assert provider.inputs["region"] == "us-east-2"
    assert json.loads(provider.inputs["defaultTags"])["tags"] == {
        "project": "flotilla",
        "stack": "aws-prod",
        "environment": "prod",
        "owner": "research",
        "cost-center": "research",
    }


def test_what_belongs_to_the_account_stays_when_a_stack_goes(planned):
    kept = {resource.kind for resource in on_aws(planned("aws-prod")) if resource.options.get("retainOnDelete")}
    beside = {kind for kind in kept if kind.startswith("Bucket") and kind != "Bucket"}  # tests/contract/test_aws_storage.py
    assert kept - beside == {"Bucket", "Key", "EncryptionByDefault", "InstanceMetadataDefaults", "OpenIdConnectProvider"}


def test_what_holds_checkpoints_is_protected_and_kept_in_prod_alone(planned):
    kept = {
        resource.kind
        for resource in on_aws(planned("aws-prod"))
        if resource.options.get("protect") and resource.options.get("retainOnDelete")
    }
    assert kept == {"Bucket", "Key"}
    assert of(planned("aws-prod"), "LustreFileSystem")[0].options.get("protect") is True  # not kept: subnet and group could not go
    assert not [
        resource.name for resource in on_aws(planned("aws-dev")) if "protect" in resource.options or "retainOnDelete" in resource.options
    ]
    assert of(planned("aws-prod"), "LustreFileSystem")[0].options.get("protect") is True
    assert [of(planned(name), "Bucket")[0].inputs["forceDestroy"] for name in STACKS] == [True, False]


def test_the_budget_tells_of_each_threshold_and_of_the_forecast(planned):
    [budget] = of(planned("aws-prod"), "Budget")
    assert (budget.inputs["limitAmount"], budget.inputs["limitUnit"], budget.inputs["timeUnit"]) == ("300000.00", "USD", "MONTHLY")
    told = [(notification["notificationType"], notification["threshold"]) for notification in budget.inputs["notifications"]]
    assert told == [("ACTUAL", 50), ("ACTUAL", 80), ("ACTUAL", 100), ("FORECASTED", 100)]
    assert {tuple(notification["subscriberEmailAddresses"]) for notification in budget.inputs["notifications"]} == {("you@example.com",)}


def test_monitoring_is_given_where_it_is_asked_for(planned):
    assert [name for name in STACKS if any(resource.name.endswith("-monitoring") for resource in of(planned(name), "RolePolicy"))] == [
        "aws-prod"
    ]


def test_logs_of_nodes_are_kept_for_a_month_and_end_with_the_stack(planned):
    [group] = [each for each in of(planned("aws-prod"), "LogGroup") if each.name.endswith("-nodes")]
    assert (group.inputs["name"], group.inputs["retentionInDays"]) == ("/flotilla/aws-prod", 30)
    assert not [each for each in of(planned("aws-dev"), "LogGroup") if each.name.endswith("-nodes")]
    [policy] = [json.loads(each.inputs["policy"]) for each in of(planned("aws-prod"), "RolePolicy") if each.name.endswith("-monitoring")]
    _, logs = policy["Statement"]
    assert "logs:CreateLogGroup" not in logs["Action"]
    assert {resource.partition(":log-group:")[2] for resource in logs["Resource"]} == {"/flotilla/aws-prod", "/flotilla/aws-prod:*"}


def test_a_stack_whose_checkpoints_are_folders_or_volumes_of_nodes_has_neither_bucket_nor_key(changed):
    for checkpoints in ({"kind": "instance"}, {"kind": "network", "volume": "runs", "size": "500GB"}):
        plan = changed("aws-dev", {"checkpoints": checkpoints, "fleets.0.nodes": 1})
        assert not of(plan, "Bucket") and not of(plan, "Key")
        assert not [policy.name for policy in of(plan, "RolePolicy") if policy.name.endswith("checkpoints")]
        assert "checkpoints" not in plan.outputs["cloud"]
