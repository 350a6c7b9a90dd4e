"""What AWS is asked before `pulumi up`: against moto's EC2, and against answers that botocore checks where moto has none."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto import mock_aws
from support.aws_api import REGION, api, existing_network, stack, stubbed

from infra.aws import preflight as aws
from infra.preflight import command as preflight
from infra.preflight.answers import Answer
from stacks import load
from stacks.load import StackError
from stacks.places import machines

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("aws_keys")
IMAGE = "ami-0123456789abcdef0"


def verdicts(found: list[Answer]) -> dict[str, str]:
    return {answer.check: answer.verdict for answer in found}


# Credentials


def test_without_credentials_one_line_says_how_to_log_in_and_nothing_else_is_asked(monkeypatch, tmp_path):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("HOME", str(tmp_path))
    found = aws.ask(stack(), machines(stack()))
    assert (found[0].verdict, found[0].says) == ("failed", "Unable to locate credentials")
    assert "aws sso login" in found[0].fix
    assert {answer.verdict for answer in found[1:]} == {"unknown"} and len(found) == 1 + len(aws.CHECKS)


def test_a_profile_that_there_is_not_is_said_and_nothing_else_is_asked(monkeypatch):
    monkeypatch.setenv("AWS_PROFILE", "nope")
    first, *others = aws.ask(stack(), machines(stack()))
    assert first.verdict == "failed" and "(nope)" in first.says
    assert {answer.check: answer.says for answer in others} == dict.fromkeys(aws.CHECKS, "not asked without credentials")


def test_credentials_that_aws_does_not_accept_are_said():
    sts = stubbed("sts", ("get_caller_identity", "ExpiredToken", {}))
    found = aws.credentials(api(stack(), sts=sts))
    assert (found.verdict, found.says) == ("failed", "AWS does not accept them: the message of ExpiredToken")


@pytest.mark.usefixtures("ec2")
def test_who_asks_is_shown():
    found = aws.credentials(api(stack(), sts=boto3.client("sts", region_name=REGION)))
    assert found.verdict == "ok" and "account 123456789012" in found.says


# Zones and fabric


def test_zones_that_offer_the_machine_are_named(ec2):
    [found] = aws.zones(api(stack(), ec2=ec2))
    assert found.verdict == "ok" and found.says.startswith("g6.8xlarge in us-east-1a, ")


def test_a_zone_without_the_machine_fails_with_those_that_have_it(ec2):
    offered = ec2.describe_instance_type_offerings(
        LocationType="availability-zone", Filters=[{"Name": "instance-type", "Values": ["p4d.24xlarge"]}]
    )["InstanceTypeOfferings"]
    there = {offer["Location"] for offer in offered}
    [without, *_] = sorted({f"us-east-1{letter}" for letter in "abcdef"} - there)
    [found] = aws.zones(api(stack(fleet={"machine": "p4d.24xlarge"}, network={"zones": [without]}), ec2=ec2))
    assert found.verdict == "failed"
    assert f"flotilla:network.zones[0]: '{without}' does not offer p4d.24xlarge" in found.says
    assert all(zone in found.says for zone in there)


def test_a_region_without_the_machine_fails(ec2):
    nowhere = stubbed(
        "ec2",
        (
            "describe_instance_type_offerings",
            {"InstanceTypeOfferings": []},
            {"LocationType": "availability-zone", "Filters": [{"Name": "instance-type", "Values": ["g6.8xlarge"]}]},
        ),
    )
    [found] = aws.zones(api(stack(), ec2=nowhere))
    assert found.verdict == "failed" and "'g6.8xlarge' is not offered in us-east-1" in found.says


def test_fewer_efa_interfaces_than_the_table_says_fail(ec2):
    def answer(interfaces: int) -> Any:
        network = {"EfaSupported": bool(interfaces), "EfaInfo": {"MaximumEfaInterfaces": interfaces}}
        kind = {"InstanceType": "p5.48xlarge", "NetworkInfo": network}
        return stubbed("ec2", ("describe_instance_types", {"InstanceTypes": [kind]}, {"InstanceTypes": ["p5.48xlarge"]}))

    of = stack(fleet={"machine": "p5.48xlarge"})
    assert [found.verdict for found in aws.efa(api(of, ec2=answer(32)))] == ["ok"]
    for interfaces in (0, 4):
        [found] = aws.efa(api(of, ec2=answer(interfaces)))
        assert found.says == f"p5.48xlarge has {interfaces} EFA interfaces here, and stacks/places/aws.py says 32"
    assert not [*aws.efa(api(stack(fleet={"machine": "g6.xlarge"}), ec2=ec2))]


# Capacity

HELD = {
    "CapacityReservationId": "cr-0123456789abcdef0",
    "ReservationType": "default",
    "State": "active",
    "InstanceType": "p5.48xlarge",
    "AvailabilityZone": "us-east-2a",
    "TotalInstanceCount": 4,
    "AvailableInstanceCount": 4,
}
BLOCK = {"capacity": {"kind": "block", "id": "cr-0123456789abcdef0"}}
GROUP = "arn:aws:ec2:us-east-2:123456789012:placement-group/side-by-side"
IN_GROUP = {"capacity": {"kind": "reservation", "id": "cr-0123456789abcdef0", "policy": "side-by-side"}}
SOON = datetime(2027, 1, 2, 11, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    ("fleet", "change", "verdict", "says"),
    [
        ({}, {}, "ok", "holds 4 p5.48xlarge in us-east-2a, 4 of them free"),
        ({}, {"AvailableInstanceCount": 1}, "unknown", "1 of them free; fleet h100 needs 4: fine if the others are its own"),
        ({}, {"TotalInstanceCount": 3, "AvailableInstanceCount": 3}, "failed", "holds 3 machines, fleet h100 needs 4"),
        ({}, {"InstanceType": "p5en.48xlarge"}, "failed", "holds p5en.48xlarge, fleet h100 is of p5.48xlarge"),
        ({}, {"AvailabilityZone": "us-east-2c"}, "failed", "is in us-east-2c, the stack in us-east-2a"),
        ({}, {"State": "expired"}, "failed", "is expired"),
        ({}, {"PlacementGroupArn": GROUP}, "failed", "is in placement group side-by-side, the stack says none"),
        (IN_GROUP, {"PlacementGroupArn": GROUP}, "ok", "4 of them free"),
        (IN_GROUP, {}, "failed", "is in no placement group, the stack says side-by-side"),
        (IN_GROUP, {"PlacementGroupArn": f"{GROUP}-2"}, "failed", "is in placement group side-by-side-2"),
        ({}, {"Tenancy": "dedicated"}, "failed", "is of tenancy dedicated, and Pulumi launches machines of the default one"),
        ({}, {"Tenancy": "default"}, "ok", "4 of them free"),
        ({}, {"ReservationType": "capacity-block"}, "failed", "is a block, the stack says reservation"),
        (BLOCK, {}, "failed", "is a reservation, the stack says block"),
        (BLOCK, {"ReservationType": "capacity-block", "EndDate": SOON}, "ok", "4 of them free, until 2027-01-02 11:30 UTC"),
        (
            BLOCK,
            {"ReservationType": "capacity-block", "State": "scheduled", "StartDate": SOON},
            "failed",
            "is scheduled and begins at 2027-01-02 11:30 UTC",
        ),
    ],
)
def test_a_reservation_must_hold_what_the_fleet_wants(fleet, change, verdict, says):
    wanted = {"CapacityReservationIds": ["cr-0123456789abcdef0"]}
    ec2 = stubbed("ec2", ("describe_capacity_reservations", {"CapacityReservations": [HELD | change]}, wanted))
    [found] = aws.capacity(api(stack("aws-prod", fleet=fleet), ec2=ec2))
    assert (found.verdict, found.says.startswith("cr-0123456789abcdef0 ")) == (verdict, True)
    assert says in found.says
    assert bool(found.fix) == (verdict != "ok")


def test_a_reservation_that_there_is_not_fails():
    wanted = {"CapacityReservationIds": ["cr-0123456789abcdef0"]}
    ec2 = stubbed("ec2", ("describe_capacity_reservations", "InvalidCapacityReservationId.NotFound", wanted))
    [found] = aws.capacity(api(stack("aws-prod"), ec2=ec2))
    assert (found.verdict, found.says) == ("failed", "cr-0123456789abcdef0 is not there in us-east-2")


def test_a_reservation_must_be_in_the_zone_of_the_first_existing_subnet(ec2):
    vpc, subnets = existing_network(ec2, "10.1.1.0/24", zone="us-east-1b")
    of = stack("aws-prod", region=REGION, network={"vpc": vpc, "subnets": subnets})
    [zone] = aws._zones(api(of, ec2=ec2))
    found = aws.fits(HELD | {"AvailabilityZone": "us-east-1a"}, of.fleets[0], of, [zone])
    assert (found.verdict, found.says) == ("failed", "cr-0123456789abcdef0 is in us-east-1a, the stack in us-east-1b")
    second = aws.fits(HELD | {"AvailabilityZone": "us-east-1a"}, of.fleets[0], of, [zone, "us-east-1a"])
    assert second.verdict == "failed"  # nodes of Pulumi stand in the first


# Images


def image(state: str = "available", architecture: str = "x86_64") -> Any:
    """An EC2 that has one image; moto's own images have no architecture."""
    found = {"ImageId": IMAGE, "State": state, "Architecture": architecture, "Name": "nodes"}
    return stubbed("ec2", ("describe_images", {"Images": [found]}, {"ImageIds": [IMAGE]}))


PINNED = {"fleet": {"image": IMAGE}, "region": REGION, "network": {"zones": ["us-east-1a"]}}


def test_a_pinned_image_must_be_there_and_of_the_nodes_architecture(ec2):
    of = stack("aws-prod", **PINNED)
    assert verdicts([*aws.images(api(of, ec2=image()))]) == {"image": "ok"}
    [arm] = aws.images(api(of, ec2=image(architecture="arm64")))
    assert arm.verdict == "failed" and "of arm64" in arm.says
    [late] = aws.images(api(of, ec2=image(state="deregistered")))
    assert late.verdict == "failed" and "is deregistered" in late.says
    [absent] = aws.images(api(of, ec2=ec2))
    assert (absent.verdict, absent.says) == ("failed", f"{IMAGE} is not there in us-east-1")
    assert absent.fix.startswith("aws ssm get-parameter --region us-east-1 --name /aws/service/deeplearning/")


def test_an_image_that_is_not_pinned_is_the_newest_of_its_parameter():
    name = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id"
    ssm = stubbed("ssm", ("get_parameter", {"Parameter": {"Name": name, "Value": IMAGE}}, {"Name": name}))
    [found] = aws.images(
        api(stack("aws-prod", **PINNED | {"fleet": {"image": ...}, "checkpoints": {"kind": "bucket"}}), ec2=image(), ssm=ssm)
    )
    assert found.verdict == "ok" and IMAGE in found.says


def test_images_of_machines_that_dstack_launches_are_its_own():
    assert not [*aws.images(api(stack()))]


# The whole


@pytest.mark.parametrize("code", ["AccessDenied", "AccessDeniedException", "UnauthorizedOperation"])
def test_a_call_that_is_forbidden_says_what_to_allow_and_fails_nothing(code):
    wanted = {"ServiceCode": "ec2", "QuotaCode": "L-3819A6DF"}
    refused = stubbed("service-quotas", ("get_service_quota", code, wanted))
    [found] = aws.answers("quota", aws.quota, api(stack(), service_quotas=refused))
    assert (found.verdict, found.fix) == ("unknown", "allow GetServiceQuota to this identity")


def test_aws_that_does_not_answer_fails_within_its_patience():
    nobody = boto3.client("ec2", region_name=REGION, endpoint_url="http://127.0.0.1:9", config=aws.PATIENCE)
    [found] = aws.answers("zones", aws.zones, api(stack(), ec2=nobody))
    assert found.verdict == "failed" and found.says.startswith("AWS did not answer: ")


def test_all_checks_are_asked_in_one_session(ec2, monkeypatch):
    monkeypatch.setattr(preflight.prices, "cost", lambda stack: preflight.prices.Cost(()))
    with mock_aws():
        found = preflight.preflight(stack(fleet={"capacity": {"kind": "on-demand"}}))
    assert [answer.check for answer in found] == ["credentials", "zones", "efa", "quota", "quota", "network", "network", "budget"]


def test_a_stack_without_a_cloud_has_nothing_to_ask():
    with pytest.raises(StackError, match=r"stacks/Pulumi\.local\.yaml: flotilla:cloud: local has nothing to ask"):
        preflight.preflight(load.load("local", ROOT))


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": "/nonexistent",
        "AWS_EC2_METADATA_DISABLED": "true",
        "GPUHUNT_CATALOG_DIR": "/nonexistent",
    }
    run = [sys.executable, "-m", "infra.preflight", *arguments]
    return subprocess.run(run, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_the_command_ends_with_1_where_a_check_failed_and_with_2_at_a_mistake():
    done = command("aws-dev")
    assert (done.returncode, done.stderr) == (1, "")
    assert "Unable to locate credentials" in done.stdout and "aws sso login" in done.stdout
    assert done.stdout.splitlines()[-1] == "aws-dev: 1 ok, 1 failed, 12 unknown"
    found = json.loads(command("aws-dev", "--json").stdout)
    assert [answer["check"] for answer in found if answer["verdict"] == "failed"] == ["credentials"]
    mistake = command("aws-def")
    assert (mistake.returncode, mistake.stdout) == (2, "")
    assert mistake.stderr.startswith("there is no stack 'aws-def'")
