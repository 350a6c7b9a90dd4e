"""What holds for every resource on GCP: of the stacks gcp-dev and gcp-prod, and of stacks that differ from them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from ipaddress import IPv4Network
from typing import Any

import pytest
import yaml
from support.gcp_plans import STACKS, every, on_gcp
from support.plans import of


def values(value: Any) -> Iterator[Any]:
    """Everything that stands in a resource's inputs: keys with their values, at any depth."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield key, item
            yield from values(item)
    elif isinstance(value, list):
        for item in value:
            yield from values(item)


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        (
            "dev",
            "2*Account Bucket BucketIAMMember 4*Firewall IAMCustomRole 3*IAMMember Network Router RouterNat 9*Service Subnetwork "
            "Address Disk DiskResourcePolicyAttachment HealthCheck InstanceGroupManager InstanceTemplate PerInstanceConfig ResourcePolicy "
            "Secret SecretIamMember SecretVersion",  # the control node
        ),
        (
            "server elsewhere",
            "2*Account Bucket BucketIAMMember 2*Firewall IAMCustomRole 3*IAMMember Network Router RouterNat 6*Service Subnetwork",
        ),
        (
            "prod",
            "3*Account 2*AccountIamMember Bucket BucketIAMMember Budget CryptoKey CryptoKeyIAMMember 3*Firewall 24*IAMMember "
            "4*InstanceFromTemplate InstanceTemplate KeyRing 3*Network NotificationChannel Router RouterNat 12*Service 10*Subnetwork "
            "WorkloadIdentityPool WorkloadIdentityPoolProvider",
        ),
    ],
)
def test_the_stack_is_made_of_these(name, counts, gcp_plan):
    wanted = Counter({word.split("*")[-1]: int(word.split("*")[0]) if "*" in word else 1 for word in counts.split()})
    found = Counter(resource.kind for resource in on_gcp(gcp_plan(name)))
    assert found == wanted


@every()
def test_every_resource_is_in_a_component(name, gcp_plan):
    plan = gcp_plan(name)
    components = {resource.urn for resource in plan.resources if resource.component}
    assert len(on_gcp(plan)) >= 15
    for resource in on_gcp(plan):
        assert resource.parent in components, resource.name


@every()
def test_every_resource_is_made_by_a_provider_of_the_stack_and_what_takes_labels_has_them(name, gcp_plan):
    """A template is without, as labels would replace it and with it the nodes; so are the services, which take none."""
    plan = gcp_plan(name)
    providers = {f"{resource.urn}::{resource.id}": resource for resource in plan.resources if resource.type == "pulumi:providers:gcp"}
    for resource in on_gcp(plan):
        provider = providers[resource.options["provider"]]
        labelled = "default_labels" in provider.inputs or "defaultLabels" in provider.inputs
        assert labelled == (resource.kind not in ("InstanceTemplate", "Service")), resource.name


@every(*STACKS)
def test_the_labels_say_whose_it_is(name, planned):
    [labels] = [resource.inputs["defaultLabels"] for resource in planned(name).resources if "defaultLabels" in resource.inputs]
    settings = yaml.safe_load(labels)
    assert settings.items() >= {"project": "flotilla", "stack": name, "environment": name.removeprefix("gcp-")}.items()
    assert settings["cost-center"] == "research"


@every()
def test_nothing_is_made_before_the_apis_are_on(name, gcp_plan):
    plan = gcp_plan(name)
    on = {resource.urn for resource in of(plan, "Service")}
    [labelled] = [resource for resource in plan.resources if resource.type == "pulumi:providers:gcp" and "defaultLabels" in resource.inputs]
    assert on <= set(labelled.options["dependencies"])
    assert {"compute.googleapis.com", "iam.googleapis.com"} <= {resource.inputs["service"] for resource in of(plan, "Service")}
    assert not any(resource.inputs["disableOnDestroy"] for resource in of(plan, "Service"))  # others in the project may use them


GOOGLE = ("35.235.240.0/20", "35.191.0.0/16", "130.211.0.0/22")  # Identity-Aware Proxy, and the probes of health checks
KEPT = ("Bucket", "KeyRing", "CryptoKey")


@every(*STACKS)
def test_production_keeps_its_checkpoints_and_their_key(name, planned):
    production = name == "gcp-prod"
    for resource in planned(name).resources:
        if resource.kind in ("Stash", "CryptoKeyIAMMember"):  # a record of what there is; kept with the key, and not protected
            continue
        kept = production and resource.kind in KEPT and not resource.component
        assert bool(resource.options.get("protect")) == bool(resource.options.get("retainOnDelete")) == kept, resource.name
        assert (resource.inputs.get("deletionPolicy") == "PREVENT") == (kept and resource.kind != "KeyRing"), (
            resource.name
        )  # a ring has none
    [bucket] = of(planned(name), "Bucket")
    assert bucket.inputs["forceDestroy"] != production


@every("share", "disk")
def test_production_keeps_other_stores_too(name, gcp_plan):
    [store] = [
        resource for resource in on_gcp(gcp_plan(name)) if resource.type in ("gcp:filestore/instance:Instance", "gcp:compute/disk:Disk")
    ]
    assert (store.options["protect"], store.options["retainOnDelete"], store.inputs["deletionPolicy"]) == (True, True, "PREVENT")


@every()
def test_only_a_bastion_has_a_public_address(name, gcp_plan):
    with_one = [
        resource for resource in on_gcp(gcp_plan(name)) if any(key == "accessConfigs" and item for key, item in values(resource.inputs))
    ]
    assert [resource.name.rpartition("-")[2] for resource in with_one] == ["bastion"] * ("bastion" in name)


@every()
def test_no_text_is_made_of_what_is_not_known(name, gcp_plan):
    texts = [item for resource in on_gcp(gcp_plan(name)) for _, item in values(resource.inputs) if isinstance(item, str)]
    assert texts
    assert not [text for text in texts if "None" in text]


@every()
def test_nobody_is_let_in_from_anywhere(name, gcp_plan):
    rules = of(gcp_plan(name), "Firewall")
    assert rules
    for rule in rules:
        assert rule.inputs["direction"] == "INGRESS"
        for whence in rule.inputs["sourceRanges"]:
            assert IPv4Network(whence).is_private or whence in ("203.0.113.0/24", *GOOGLE), rule.name


@every()
def test_names_fit_what_gcp_takes(name, gcp_plan):
    """Pulumi puts a dash and seven characters behind the names of those that have none of their own."""
    for resource in on_gcp(gcp_plan(name)):
        if resource.type.startswith("gcp:compute/") and "name" not in resource.inputs:
            assert re.fullmatch(r"[a-z][a-z0-9-]{0,54}", resource.name), resource.name
        if "accountId" in resource.inputs:
            assert re.fullmatch(r"[a-z][a-z0-9-]{4,28}[a-z0-9]", resource.inputs["accountId"])
        if "roleId" in resource.inputs:
            assert re.fullmatch(r"[a-zA-Z0-9_.]{3,64}", resource.inputs["roleId"])
        for key in ("workloadIdentityPoolId", "workloadIdentityPoolProviderId"):
            assert re.fullmatch(r"(?!gcp-)[a-z0-9-]{4,32}", resource.inputs.get(key, "none"))


def test_two_plans_of_a_stack_are_equal(gcp_plan, planned):
    assert on_gcp(gcp_plan("prod")) == on_gcp(planned("gcp-prod"))


def test_another_label_touches_no_node(changed, planned):
    """Neither the template, whose change replaces them, nor what is made of it."""
    kinds = ("InstanceTemplate", "InstanceFromTemplate")
    after = changed("gcp-prod", {"tags.team": "vision"})
    for kind in kinds:
        assert of(planned("gcp-prod"), kind)
        assert [resource.inputs for resource in of(planned("gcp-prod"), kind)] == [resource.inputs for resource in of(after, kind)]
