"""A fleet that is to be deleted while runs are on it, on a real server with moto's machines."""

from __future__ import annotations

import boto3
import pytest
from dstack.api import Client as Dstacks
from dstack.api import Task
from support.dstack_place import SECONDS, SPOT, Place

from infra.dstack_resources.client import DstackRefused, wait
from stacks.dstack_api import ResourcesSpec

pytestmark = pytest.mark.hosts


def test_a_fleet_with_runs_is_not_ended_unless_the_stack_says_so(place):
    """The machine of the run is one of moto's, on which nothing runs, so the run stays at its beginning."""
    place.backend.create(place.at | {"config": place.dstack.aws() | {"os_images": {"nvidia": image("us-east-1")}}})
    props = place.props(SPOT | {"name": "busy", "placement": "any", "spot_policy": "on-demand"})
    made = place.fleet.create(props)
    submit(place, "busy")
    with pytest.raises(
        DstackRefused,
        match=r"^fleet busy: has runs: a-run; stop them .dstack stop NAME., or `.*on_destroy wait`, or stop, and `.*--run-program`$",
    ):
        place.fleet.delete(made.id, props)
    place.says(on_destroy="wait", timeout=2)
    with pytest.raises(DstackRefused, match=r"^fleet busy: waiting for the end of a-run: not within 2 s"):
        place.fleet.delete(made.id, props)
    assert place.fleet.read(made.id, props).outs == props
    assert states("us-east-1") == {"running"}
    place.says(on_destroy="stop")
    place.fleet.delete(made.id, props)
    assert place.fleet.read(made.id, props).id == ""
    assert states("us-east-1") == {"terminated"}


def image(region: str) -> dict[str, str]:
    """A disk image for dstack to start machines from."""
    ec2 = boto3.client("ec2", region_name=region)
    name = "any"
    ec2.register_image(Name=name, Architecture="x86_64", RootDeviceName="/dev/sda1", VirtualizationType="hvm")
    return {"name": name, "owner": "123456789012", "user": "ubuntu"}


def states(region: str) -> set[str]:
    """Of all machines in the region."""
    found = boto3.client("ec2", region_name=region).describe_instances()["Reservations"]
    return {machine["State"]["Name"] for reservation in found for machine in reservation["Instances"]}


def submit(place: Place, fleet: str) -> None:
    """A run; returns when it has its machine."""
    client = Dstacks.from_config(project_name=place.name, server_url=place.dstack.url, user_token=place.dstack.token)
    task = Task.model_validate(
        {"name": "a-run", "commands": ["sleep 1000"], "fleets": [fleet], "image": "debian:12", "user": "root", "spot_policy": "auto"}
    )
    task.resources = ResourcesSpec.model_validate({"cpu": "x86:2..", "gpu": "L4:1", "disk": "10GB.."})
    client.runs.apply_configuration(task, repo=None)

    def placed() -> str | None:
        run = place.dstack.api.runs.get(place.name, "a-run")
        assert run.status.value in ("submitted", "pending", "provisioning"), (
            run.status,
            run.jobs[0].job_submissions[-1].termination_reason_message,
        )
        return None if run.fleet and states("us-east-1") else run.status.value

    wait("a-run", placed, SECONDS)
