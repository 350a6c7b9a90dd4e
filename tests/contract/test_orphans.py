"""Machines and volumes that carry a stack's tag and that neither Pulumi nor dstack knows: moto's EC2, and answers in Google's form."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from support import gcp_api
from support.aws_api import REGION, api, stack, stubbed

from infra import orphans, prices
from infra.aws import orphans as aws
from infra.gcp import orphans as gcp
from infra.orphans import Dstack, Rented, State

pytestmark = pytest.mark.usefixtures("aws_keys")
TAGS = [{"Key": "stack", "Value": "aws-dev"}, {"Key": "Name", "Value": "aws-dev-gpu-0"}]
BY_DSTACK = [*TAGS, {"Key": "dstack_project", "Value": "main"}, {"Key": "dstack_name", "Value": "gpu-0"}]
NOBODY = State(frozenset(), ())


def launch(ec2: Any, tags: list[dict[str, str]], **settings: Any) -> str:
    wanted = {"TagSpecifications": [{"ResourceType": "instance", "Tags": tags}], "InstanceType": "g6.8xlarge"} | settings
    return ec2.run_instances(ImageId="ami-03cf127a", MinCount=1, MaxCount=1, **wanted)["Instances"][0]["InstanceId"]


def disk(ec2: Any, tags: list[dict[str, str]] = TAGS) -> str:
    tagged = [{"ResourceType": "volume", "Tags": tags}]
    return ec2.create_volume(AvailabilityZone=f"{REGION}a", Size=500, VolumeType="gp3", TagSpecifications=tagged)["VolumeId"]


def ids(found: list[Rented]) -> set[str]:
    return {each.id for each in found}


# AWS


def test_what_has_the_tag_and_is_not_in_the_state_is_listed_with_the_command_that_ends_it(ec2):
    known, lost, spare = launch(ec2, TAGS), launch(ec2, TAGS), disk(ec2)
    launch(ec2, [{"Key": "stack", "Value": "aws-dev2"}])
    found = aws.tagged(api(stack(), ec2=ec2))
    assert ids(found) == {known, lost, spare}
    machine, volume = orphans.unknown(found, State(frozenset({known}), ()), Dstack())
    assert machine.end == f"aws ec2 terminate-instances --region {REGION} --instance-ids {lost}"
    assert volume.end == f"aws ec2 delete-volume --region {REGION} --volume-id {spare}"
    assert machine.about.startswith("g6.8xlarge in us-east-1") and volume.about == f"500 GB of gp3 in {REGION}a, available"


def test_machines_that_have_ended_are_none_and_a_stopped_one_has_no_price(ec2):
    ended, stopped = launch(ec2, TAGS), launch(ec2, TAGS)
    ec2.terminate_instances(InstanceIds=[ended])
    ec2.stop_instances(InstanceIds=[stopped])
    [found] = aws.tagged(api(stack(), ec2=ec2))
    assert found.id == stopped and not found.machine


def test_a_volume_is_listed_unless_it_ends_with_its_machine_and_is_known_with_it():
    def held(id_: str, goes: bool) -> dict[str, Any]:
        attached = [{"InstanceId": "i-1", "VolumeId": id_, "DeleteOnTermination": goes}]
        return {"VolumeId": id_, "Size": 9, "VolumeType": "gp3", "AvailabilityZone": "a", "State": "in-use", "Attachments": attached}

    tag = {"Name": "tag:stack", "Values": ["aws-dev"]}
    ec2 = stubbed(
        "ec2",
        ("describe_instances", {"Reservations": []}, {"Filters": [tag, {"Name": "instance-state-name", "Values": aws.LIVING}]}),
        ("describe_volumes", {"Volumes": [held("vol-goes", goes=True), held("vol-stays", goes=False)]}, {"Filters": [tag]}),
    )
    found = aws.tagged(api(stack(), ec2=ec2))
    assert ids(found) == {"vol-stays"}
    assert orphans.unknown(found, State(frozenset({"i-1"}), ()), Dstack()) == []


@pytest.mark.parametrize(
    ("knows", "orphan"),
    [
        (lambda address: Dstack(addresses=frozenset({address})), False),
        (lambda _: Dstack(addresses=frozenset({"10.9.9.9"})), True),
        (lambda _: Dstack(names=frozenset({"gpu-0"})), False),  # one that has no address yet
        (lambda _: Dstack(), True),
    ],
)
def test_a_machine_of_dstack_is_known_by_its_address_or_its_name(ec2, knows, orphan):
    launch(ec2, BY_DSTACK)
    [found] = aws.tagged(api(stack(), ec2=ec2))
    assert found.by_dstack and bool(orphans.unknown([found], NOBODY, knows(next(iter(found.addresses))))) == orphan


def test_what_pulumi_launched_is_not_known_because_dstack_reaches_it(ec2):
    launch(ec2, TAGS)
    [found] = aws.tagged(api(stack(), ec2=ec2))
    assert orphans.unknown([found], NOBODY, Dstack(addresses=found.addresses)) == [found]


# GCP


def google_machine(name: str, **more: Any) -> dict[str, Any]:
    zone = f"{gcp_api.LINK}/zones/us-central1-a"
    return {
        "name": name,
        "zone": zone,
        "selfLink": f"{zone}/instances/{name}",
        "machineType": f"{zone}/machineTypes/g2-standard-8",
        "status": "RUNNING",
        "creationTimestamp": "2026-11-28T09:10:11.000-07:00",
        "networkInterfaces": [{"networkIP": "10.0.0.2"}],
        "disks": [{"source": f"{zone}/disks/{name}", "autoDelete": True}],
        **more,
    }


def google_disk(name: str, **more: Any) -> dict[str, Any]:
    zone = f"{gcp_api.LINK}/zones/us-central1-a"
    kind = f"{zone}/diskTypes/pd-ssd"
    return {"name": name, "zone": zone, "selfLink": f"{zone}/disks/{name}", "sizeGb": "100", "type": kind, "status": "READY", **more}


def google_has(google: Any, machines: list[dict[str, Any]], disks: list[dict[str, Any]]) -> list[Rented]:
    answers = {
        f"{gcp_api.COMPUTE}/aggregated/instances": {"items": {"zones/us-central1-a": {"instances": machines}, "zones/us-central1-b": {}}},
        f"{gcp_api.COMPUTE}/aggregated/disks": {"items": {"zones/us-central1-a": {"disks": disks}}},
    }
    return gcp.labelled(google(gcp_api.stack(), answers))


def test_gcp_asks_for_the_label_and_knows_machines_by_their_path_or_by_their_group(google):
    made_by = {"items": [{"key": "created-by", "value": "projects/123456/zones/us-central1-a/instanceGroupManagers/queued"}]}
    machines = [google_machine("known"), google_machine("lost"), google_machine("of-a-group", metadata=made_by)]
    found = google_has(google, machines, [google_disk("lost"), google_disk("spare")])
    assert all(query["filter"] == ["labels.stack=gcp-dev"] for query in gcp_api.Google.queries)
    at = "projects/my-project-id/zones/us-central1-a"
    lost, spare = orphans.unknown(found, State(frozenset({f"{at}/instances/known", f"{at}/instanceGroupManagers/queued"}), ()), Dstack())
    assert lost.end == "gcloud compute instances delete lost --zone us-central1-a --project my-project-id"
    assert spare.end == "gcloud compute disks delete spare --zone us-central1-a --project my-project-id"  # the other goes with its machine
    assert (lost.machine, spare.about) == ("g2-standard-8", "100 GB of pd-ssd in us-central1-a, READY")


def test_gcp_machines_of_dstack_have_its_name_and_what_ended_has_no_price(google):
    labels = {"stack": "gcp-dev", "dstack_project": "main", "dstack_name": "gpu-0"}
    [found] = google_has(google, [google_machine("gpu-0-abc", labels=labels, status="TERMINATED")], [])
    assert (found.name, found.by_dstack, found.machine, found.addresses) == ("gpu-0", True, "", {"10.0.0.2"})


# Pulumi, dstack, prices


def test_the_state_of_pulumi_has_ids_and_what_was_asked_for():
    pending = {"type": "creating", "resource": {"urn": "urn:pulumi:aws-dev::flotilla::f:aws:Nodes$aws:ec2/instance:Instance::gpu-3"}}
    deleting = {"type": "deleting", "resource": {"urn": "urn:pulumi:aws-dev::flotilla::aws:ec2/instance:Instance::gpu-4"}}
    resources = [{"urn": "a", "id": "i-1"}, {"urn": "b"}, {"urn": "c", "id": ""}]
    found = orphans.as_state({"version": 3, "deployment": {"resources": resources, "pending_operations": [pending, deleting]}})
    assert found == State(frozenset({"i-1"}), ("aws:ec2/instance:Instance gpu-3",))
    assert orphans.as_state({"deployment": {}}) == NOBODY


def test_what_dstack_has_ended_it_does_not_know():
    def instance(name: str, hostname: str | None, status: str = "idle") -> Any:
        return SimpleNamespace(name=name, hostname=hostname, status=SimpleNamespace(value=status))

    living = [instance("a", "10.0.0.1"), instance("b", None, "provisioning")]
    fleet = SimpleNamespace(instances=[*living, instance("c", "10.0.0.3", "terminated")])
    volumes = [SimpleNamespace(volume_id="vol-1", deleted=False), SimpleNamespace(volume_id="vol-2", deleted=True)]
    assert orphans.as_dstack([fleet], volumes) == Dstack(frozenset({"10.0.0.1"}), frozenset({"b"}), frozenset({"vol-1"}))


def test_a_machine_without_a_spot_price_costs_at_most_that_on_demand(monkeypatch):
    monkeypatch.setattr(prices, "catalogue", lambda provider: prices.bundled(provider, prices.PricesUnknown("none"))[1])
    found = prices.listed(stack(), {("g6.8xlarge", True), ("g6.8xlarge", False), ("x9.huge", False)})
    dear = found["g6.8xlarge", False]
    assert dear.usd and not dear.at_most and found["g6.8xlarge", True] == prices.Listed(dear.usd, True)
    assert found["x9.huge", False].line() == "price not known"


# The command


@pytest.fixture
def command(monkeypatch, ec2, tmp_path):
    """Runs `flotilla orphans` with moto's EC2, and a `pulumi` that prints this state."""

    def typed(state: dict[str, Any], *words: str, rc: int = 0) -> int:
        (tmp_path / "state").write_text(json.dumps(state))
        (tmp_path / "pulumi").write_text(f"#!/bin/sh\ncat {tmp_path}/state\n[ {rc} = 0 ] || echo 'error: no stack' >&2\nexit {rc}\n")
        (tmp_path / "pulumi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        monkeypatch.setattr(prices, "catalogue", lambda provider: prices.bundled(provider, prices.PricesUnknown("none"))[1])
        return orphans.main(["aws-dev", *words])

    return typed


def test_the_command_prints_price_and_end_of_each_and_its_exit_code_says_whether_there_are_any(command, ec2, capsys):
    lost = launch(ec2, TAGS)
    assert command({"deployment": {}}) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"machine  {lost}  aws-dev-gpu-0  g6.8xlarge in ") and "USD an hour" in said[0]
    assert said[1].strip() == f"aws ec2 terminate-instances --region {stack().region} --instance-ids {lost}"
    assert said[2] == "aws-dev: 1 of 1 machines and volumes with the tag stack=aws-dev are known to nobody"
    assert command({"deployment": {}}, "--json") == 1
    [row] = json.loads(capsys.readouterr().out)
    assert row["id"] == lost and row["hourly"] > 0
    assert command({"deployment": {"resources": [{"id": lost}]}}) == 0


def test_a_state_that_cannot_be_read_is_one_error(command, capsys):
    assert command({}, rc=255) == 2
    assert capsys.readouterr().err == "error: pulumi stack export --stack aws-dev: error: no stack\n"


@pytest.mark.parametrize("name", ["local", "onprem"])
def test_a_stack_without_a_cloud_of_ours_is_one_error(name, capsys):
    assert orphans.main([name]) == 2
    assert f"stacks/Pulumi.{name}.yaml: flotilla:cloud: " in (said := capsys.readouterr().err)
    assert said.count("\n") == 1 and "flotilla orphans is for aws, gcp" in said
