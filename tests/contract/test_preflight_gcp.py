"""What GCP is asked before `pulumi up`: of a server on this machine that answers as Google's REST interfaces do."""

from __future__ import annotations

from typing import Any

import pytest
import requests
from google.auth.exceptions import DefaultCredentialsError
from support.gcp_api import COMPUTE, LINK, Answers, Google, stack

from infra.gcp import preflight as gcp
from infra.gcp.preflight.api import Api
from infra.preflight.answers import Answer
from stacks.places import machine as machine_type
from stacks.places import machines
from stacks.places.gcp import MACHINES

ELSEWHERE = {"host": "elsewhere"}
STATE, PAYS = "cloudresourcemanager/v1/projects/my-project-id", "cloudbilling/v1/projects/my-project-id/billingInfo"
PROJECT = {STATE: {"lifecycleState": "ACTIVE"}, PAYS: {"billingEnabled": True}}
REGION = {
    f"{COMPUTE}/regions/us-central1": {
        "zones": [f"{LINK}/zones/us-central1-{letter}" for letter in "ab"],
        "quotas": [{"metric": "PREEMPTIBLE_NVIDIA_L4_GPUS", "limit": 4, "usage": 1}, {"metric": "CPUS", "limit": 8, "usage": 6}],
    },
    COMPUTE: {"quotas": [{"metric": "GPUS_ALL_REGIONS", "limit": 8, "usage": 0}]},
    f"{COMPUTE}/zones/us-central1-a/machineTypes/g2-standard-8": {"name": "g2-standard-8"},
}


def told(found: list[Answer]) -> list[tuple[str, str]]:
    return [(answer.check, answer.verdict) for answer in found]


# Who asks


def test_without_credentials_one_line_says_how_to_log_in_and_nothing_else_is_asked(monkeypatch):
    def nobody(**_: Any) -> None:
        raise DefaultCredentialsError("none")

    monkeypatch.setattr(gcp, "default", nobody)
    found = gcp.ask(stack(), machines(stack()))
    assert (found[0].check, found[0].verdict, found[0].fix) == ("credentials", "failed", "gcloud auth application-default login")
    assert {answer.verdict for answer in found[1:]} == {"unknown"} and len(found) == 1 + len(gcp.CHECKS)


@pytest.mark.parametrize(
    ("answers", "says", "fix"),
    [
        ({}, "my-project-id is not there, or not for you", "gcloud projects list"),
        ({STATE: (403, "The caller does not have permission")}, "The caller does not have permission", "gcloud projects list"),
        (PROJECT | {STATE: {"lifecycleState": "DELETE_REQUESTED"}}, "is DELETE_REQUESTED", "gcloud projects undelete"),
        (PROJECT | {PAYS: {"billingEnabled": False}}, "has no billing account", "gcloud billing projects link my-project-id"),
    ],
)
def test_a_project_that_cannot_pay_or_is_not_there_ends_the_questions(answers, says, fix, google):
    found = gcp.check_all(google(stack(), answers))
    assert found[0].verdict == "failed" and says in found[0].says and found[0].fix.startswith(fix)
    assert told(found[1:]) == [(name, "unknown") for name in gcp.CHECKS]


# Zones and quota


def test_a_region_is_in_order_with_one_zone_that_offers_the_machine(google):
    [found] = gcp.zones(google(stack(), REGION))
    assert (found.verdict, found.says) == ("ok", "g2-standard-8 in us-central1-a")


@pytest.mark.parametrize(
    ("zones", "says"),
    [
        (["us-central1-b"], "g2-standard-8 is offered in us-central1-a of us-central1"),
        (["us-central1-a", "us-central1-b"], "g2-standard-8 is offered in us-central1-a of us-central1"),
        (["us-central1-x"], "us-central1-x: not in us-central1"),
    ],
)
def test_every_zone_that_the_stack_names_must_offer_the_machine(zones, says, google):
    [found] = gcp.zones(google(stack(network={"zones": zones}), REGION))
    assert (found.verdict, found.says) == ("failed", says)


def test_a_region_without_the_machine_fails(google):
    [found] = gcp.zones(google(stack(fleet={"machine": "a3-megagpu-8g"}), REGION))
    assert (found.verdict, found.says) == ("failed", "a3-megagpu-8g is offered in no zone of us-central1")


@pytest.mark.parametrize(("nodes", "verdict"), [(3, "ok"), (4, "failed")])
def test_the_quota_must_cover_all_gpus_beside_those_in_use(nodes, verdict, google):
    [found] = gcp.quota(google(stack(fleet={"nodes": nodes}, dstack=ELSEWHERE), REGION))
    assert (found.verdict, found.says) == (verdict, f"PREEMPTIBLE_NVIDIA_L4_GPUS: 3 of 4 free, the stack needs {nodes}")
    assert ("iam-admin/quotas?project=my-project-id" in found.fix) == (verdict == "failed")


def test_on_demand_gpus_count_for_all_regions_too(google):
    found = [*gcp.quota(google(stack(fleet={"machine": "a2-highgpu-8g", "capacity": {"kind": "on-demand"}}, dstack=ELSEWHERE), REGION))]
    assert [(answer.verdict, answer.says.partition(":")[0]) for answer in found] == [
        ("unknown", "NVIDIA_A100_GPUS"),
        ("failed", "GPUS_ALL_REGIONS"),
    ]


@pytest.mark.parametrize(
    ("machine", "kind", "metric"),
    [
        ("a4-highgpu-8g", "spot", "PREEMPTIBLE_NVIDIA_B200_GPUS"),
        ("a3-ultragpu-8g", "flex-start", "PREEMPTIBLE_NVIDIA_H200_GPUS"),
        ("a3-megagpu-8g", "on-demand", "NVIDIA_H100_MEGA_GPUS"),
        ("a3-highgpu-8g", "on-demand", "NVIDIA_H100_GPUS"),
        ("a2-ultragpu-1g", "on-demand", "NVIDIA_A100_80GB_GPUS"),
        ("a2-megagpu-16g", "spot", "PREEMPTIBLE_NVIDIA_A100_GPUS"),
        ("n2-standard-4", "spot", "N2_CPUS"),
    ],
)
def test_each_way_to_buy_a_machine_has_its_quota(machine, kind, metric):
    assert gcp.quota_metric(machine_type("gcp", machine), kind) == metric


def test_every_machine_type_has_a_quota_but_those_whose_name_for_it_was_not_found(google):
    assert {machine.name.partition("-")[0] for machine in MACHINES if not gcp.quota_metric(machine, "on-demand")} == {"g4"}
    [found] = gcp.quota(google(stack(fleet={"machine": "g4-standard-48"}, dstack=ELSEWHERE), REGION))
    assert (found.verdict, found.says) == ("unknown", "the quota of g4-standard-48 is not known")


# Capacity


def reservations(**change: Any) -> Answers:
    properties = {"machineType": change.pop("machineType", "a3-ultragpu-8g")}
    specific = {"count": change.pop("count", "4"), "inUseCount": change.pop("used", "0"), "instanceProperties": properties}
    zone = change.pop("zone", "europe-west1-b")
    reservation = {"name": "h200-training", "status": "READY", "zone": f"{LINK}/zones/{zone}", "specificReservation": specific} | change
    empty = {"zones/europe-west1-c": {"warning": {"code": "NO_RESULTS_ON_PAGE"}}}
    return {f"{COMPUTE}/aggregated/reservations": {"items": empty | {f"zones/{zone}": {"reservations": [reservation]}}}}


@pytest.mark.parametrize(
    ("change", "verdict", "says"),
    [
        ({}, "ok", "h200-training holds 4 a3-ultragpu-8g in europe-west1-b, 4 of them free"),
        ({"used": "3"}, "unknown", "1 of them free; fleet h200 needs 4: fine if the others are its own"),
        ({"count": "3"}, "failed", "holds 3 machines, fleet h200 needs 4"),
        ({"machineType": "a3-megagpu-8g"}, "failed", "holds a3-megagpu-8g, fleet h200 is of a3-ultragpu-8g"),
        ({"zone": "europe-west1-c"}, "failed", "is in europe-west1-c, the stack in europe-west1-b"),
        ({"status": "CREATING"}, "failed", "is CREATING, not READY"),
    ],
)
def test_a_reservation_must_hold_what_the_fleet_wants(change, verdict, says, google):
    [found] = gcp.capacity(google(stack("gcp-prod"), reservations(**change)))
    assert found.verdict == verdict and says in found.says
    assert {"filter": ["name=h200-training"]} in Google.queries


POLICY = {"policy": f"{LINK}/regions/europe-west1/resourcePolicies/compact"}


@pytest.mark.parametrize(
    ("held", "named", "verdict", "says"),
    [
        (POLICY, "compact", "ok", "h200-training holds 4 a3-ultragpu-8g"),
        (POLICY, None, "failed", "h200-training has placement policy compact, and holds machines alone that name it"),
        (POLICY, "other", "failed", "h200-training has compact, not other"),
        ({}, "compact", "failed", "h200-training has no placement policy, not compact"),
    ],
)
def test_machines_must_name_the_placement_policy_of_their_reservation(held, named, verdict, says, google):
    wanted = stack("gcp-prod", fleet={"capacity": {"kind": "reservation", "id": "h200-training", "policy": named}})
    [found] = gcp.capacity(google(wanted, reservations(resourcePolicies=held)))
    assert found.verdict == verdict and found.says.startswith(says)


def test_a_reservation_that_there_is_not_fails(google):
    [found] = gcp.capacity(google(stack("gcp-prod"), {f"{COMPUTE}/aggregated/reservations": {"items": {}}}))
    assert (found.verdict, found.says) == ("failed", "my-project-id has no reservation h200-training")


def test_a_shared_reservation_is_looked_up_in_its_own_project(google):
    shared = {"capacity": {"kind": "reservation", "id": "projects/owner-project/reservations/h200-training"}}
    [answer] = reservations().values()
    there = {"compute/compute/v1/projects/owner-project/aggregated/reservations": answer}
    assert told([*gcp.capacity(google(stack("gcp-prod", fleet=shared), there))]) == [("capacity", "ok")]


# Images

IMAGE = "ubuntu-accelerator-2204-amd64-with-nvidia-580"
IMAGES = "compute/compute/v1/projects/ubuntu-os-accelerator-images/global/images"


@pytest.mark.parametrize(
    ("answer", "verdict", "says"),
    [
        ({"name": "nodes", "status": "READY"}, "ok", "nodes of ubuntu-os-accelerator-images"),
        ({"name": "nodes", "status": "READY", "deprecated": {"state": "DEPRECATED"}}, "ok", "nodes of"),
        ({"name": "nodes", "status": "READY", "deprecated": {"state": "OBSOLETE"}}, "failed", "nodes is OBSOLETE"),
        ({"name": "nodes", "status": "PENDING"}, "failed", "nodes is PENDING"),
        (None, "failed", f"ubuntu-os-accelerator-images has no image {IMAGE}-v20260313"),
    ],
)
def test_a_pinned_image_must_be_there_and_in_use(answer, verdict, says, google):
    answers = {f"{IMAGES}/{IMAGE}-v20260313": answer} if answer else {}
    [found] = gcp.images(google(stack("gcp-prod"), answers))
    assert found.verdict == verdict and found.says.startswith(says)


def test_without_a_pin_the_family_is_asked(google):
    api = google(stack("gcp-prod", fleet={"image": ...}), {f"{IMAGES}/family/{IMAGE}": {"name": "newest", "status": "READY"}})
    assert [answer.says for answer in gcp.images(api)] == ["newest of ubuntu-os-accelerator-images"]
    assert not [*gcp.images(google(stack()))]  # dstack's machines have its own


# The whole


def test_all_checks_are_asked(google):
    found = gcp.check_all(google(stack(), PROJECT, REGION))
    assert told(found) == [("project", "ok"), ("zones", "ok"), ("quota", "ok"), ("quota", "ok")]
    assert found[-1].says == "CPUS: 2 of 8 free, the stack needs 2"  # of the control node


@pytest.mark.parametrize(
    ("answer", "verdict", "fix"),
    [
        ((403, "Compute Engine API has not been used in project 1 before or it is disabled."), "unknown", "gcloud services enable compute"),
        ((403, "Required 'compute.regions.get' permission"), "unknown", "roles/viewer"),
        ((500, "backend error"), "failed", "see the message"),
    ],
)
def test_an_api_that_is_off_or_refuses_is_told_apart(answer, verdict, fix, google):
    [found] = gcp.answers("zones", gcp.zones, google(stack(), {f"{COMPUTE}/regions/us-central1": answer}))
    assert found.verdict == verdict and fix in found.fix


def test_google_that_does_not_answer_fails():
    nobody = Api(stack(), machines(stack()), requests.Session(), "http://127.0.0.1:9/{service}")
    [found] = gcp.answers("zones", gcp.zones, nobody)
    assert (found.verdict, found.says) == ("failed", "Google did not answer: ConnectionError")
