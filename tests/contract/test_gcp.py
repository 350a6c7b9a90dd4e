"""What holds for every resource on GCP: of the stacks gcp-dev and gcp-prod, and of stacks that differ from them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from ipaddress import IPv4Network
from typing import Any

import pytest
import yaml
from gcp_plans import STACKS, every, on_gcp
from plans import of


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
            "2*Account Bucket BucketIAMMember 2*Firewall IAMCustomRole 3*IAMMember Network Router RouterNat 6*Service Subnetwork",
        ),
        (
            "prod",
            "3*Account 2*AccountIamMember Bucket BucketIAMMember Budget CryptoKey CryptoKeyIAMMember 3*Firewall 19*IAMMember "
            "4*InstanceFromTemplate InstanceTemplate KeyRing 3*Network NotificationChannel Router RouterNat 12*Service 10*Subnetwork "
            "WorkloadIdentityPool WorkloadIdentityPoolProvider",
        ),
    ],
)
def test_the_stack_is_made_of_these(name, counts, gcp_plan):
    wanted = Counter({word.split("*")[-1]: int(word.split("*")[0]) if "*" in word else 1 for word in counts.split()})
    found = Counter(one.kind for one in on_gcp(gcp_plan(name)))
    assert found == wanted


@every()
def test_every_resource_is_in_a_component(name, gcp_plan):
    plan = gcp_plan(name)
    components = {one.urn for one in plan.resources if one.component}
    assert len(on_gcp(plan)) > 15
    for one in on_gcp(plan):
        assert one.parent in components, one.name


@every()
def test_every_resource_is_made_by_a_provider_of_the_stack_and_what_takes_labels_has_them(name, gcp_plan):
    """A template is without, as labels would replace it and with it the nodes; so are the services, which take none."""
    plan = gcp_plan(name)
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
def test_nothing_is_made_before_the_apis_are_on(name, gcp_plan):
    plan = gcp_plan(name)
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
def test_production_keeps_other_stores_too(name, gcp_plan):
    [store] = [one for one in on_gcp(gcp_plan(name)) if one.type in ("gcp:filestore/instance:Instance", "gcp:compute/disk:Disk")]
    assert (store.options["protect"], store.options["retainOnDelete"], store.inputs["deletionPolicy"]) == (True, True, "PREVENT")


@every()
def test_only_a_bastion_has_a_public_address(name, gcp_plan):
    with_one = [one for one in on_gcp(gcp_plan(name)) if any(key == "accessConfigs" and item for key, item in values(one.inputs))]
    assert [one.name.rpartition("-")[2] for one in with_one] == ["bastion"] * ("bastion" in name)


@every()
def test_no_text_is_made_of_what_is_not_known(name, gcp_plan):
    texts = [item for one in on_gcp(gcp_plan(name)) for _, item in values(one.inputs) if isinstance(item, str)]
    assert texts
    assert not [text for text in texts if "None" in text]


@every()
def test_nobody_is_let_in_from_anywhere(name, gcp_plan):
    rules = of(gcp_plan(name), "Firewall")
    assert rules
    for rule in rules:
        assert rule.inputs["direction"] == "INGRESS"
        for whence in rule.inputs["sourceRanges"]:
            assert IPv4Network(whence).is_private or whence in ("35.235.240.0/20", "203.0.113.0/24"), rule.name


@every()
def test_names_fit_what_gcp_takes(name, gcp_plan):
    """Pulumi puts a dash and seven characters behind the names of those that have none of their own."""
    for one in on_gcp(gcp_plan(name)):
        if one.type.startswith("gcp:compute/") and "name" not in one.inputs:
            assert re.fullmatch(r"[a-z][a-z0-9-]{0,54}", one.name), one.name
        if "accountId" in one.inputs:
            assert re.fullmatch(r"[a-z][a-z0-9-]{4,28}[a-z0-9]", one.inputs["accountId"])
        if "roleId" in one.inputs:
            assert re.fullmatch(r"[a-zA-Z0-9_.]{3,64}", one.inputs["roleId"])
        for key in ("workloadIdentityPoolId", "workloadIdentityPoolProviderId"):
            assert re.fullmatch(r"(?!gcp-)[a-z0-9-]{4,32}", one.inputs.get(key, "none"))


def test_two_plans_of_a_stack_are_equal(gcp_plan, planned):
    assert on_gcp(gcp_plan("prod")) == on_gcp(planned("gcp-prod"))


def test_another_label_touches_no_node(changed, planned):
    """Neither the template, whose change replaces them, nor what is made of it."""
    kinds = ("InstanceTemplate", "InstanceFromTemplate")
    after = changed("gcp-prod", {"tags.team": "vision"})
    for kind in kinds:
        assert of(planned("gcp-prod"), kind)
        assert [one.inputs for one in of(planned("gcp-prod"), kind)] == [one.inputs for one in of(after, kind)]
