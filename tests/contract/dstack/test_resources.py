"""Backend, fleet, machines and volume as Pulumi makes, changes, reads and deletes them: the providers against a real server."""

from __future__ import annotations

import sqlite3
from typing import Any

import boto3
import pytest
from dstack.api import Client as Dstacks
from dstack.api import Task
from dstack_server import Running
from pulumi.runtime import rpc

from infra.dstack_resources.backend import BackendProvider
from infra.dstack_resources.client import Client, DstackRefused, connect, wait
from infra.dstack_resources.fleet import FleetProvider, MachinesProvider
from infra.dstack_resources.spec import plan
from infra.dstack_resources.volume import VolumeProvider
from stacks.dstack_api import ResourcesSpec, parse_apply_configuration
from stacks.schema import Dstack

pytestmark = pytest.mark.hosts

SECONDS = 300  # for what the server does when it comes to it
SPOT = {"type": "fleet", "name": "gpus", "placement": "cluster", "nodes": "0..2", "backends": ["aws"], "instance_types": ["g6.8xlarge"]}
SPOT |= {"spot_policy": "spot", "idle_duration": "30m", "resources": {"disk": "200GB.."}}
NEVER = "127.0.0.77"  # of this machine, but for port 9, where nobody listens


class Place:
    """A project of its own, and the providers that work on it."""

    def __init__(self, dstack: Running, name: str):
        self.dstack, self.name = dstack, dstack.project(name)
        self.at = {"server": dstack.url, "project": name}
        self.backend, self.fleet, self.machines, self.volume = BackendProvider(), FleetProvider(), MachinesProvider(), VolumeProvider()
        self.says()

    def says(self, **settings: Any) -> None:
        """What the stack says below flotilla:dstack."""
        for provider in (self.backend, self.fleet, self.machines, self.volume):
            provider.token, provider.settings = self.dstack.token, Dstack.model_validate({"drive": True, "timeout": SECONDS} | settings)

    def props(self, definition: dict[str, Any]) -> dict[str, Any]:
        return self.at | {"name": definition.get("name", "gpus"), "definition": definition}

    def on_aws(self) -> Place:
        self.backend.create(self.at | {"config": self.dstack.aws()})
        return self


@pytest.fixture
def place(dstack, request) -> Place:
    return Place(dstack, f"r-{abs(hash(request.node.name)) % 10**8}")


@pytest.fixture(scope="package")
def aws(dstack) -> Place:
    """A project with a backend, which tests leave as it is; each has fleets of its own names."""
    return Place(dstack, "resources-aws").on_aws()


def onprem(name: str, *hosts: str) -> dict[str, Any]:
    ssh = {"user": "nobody", "port": 9, "identity_file": "~/.ssh/flotilla", "network": "10.99.0.0/24", "hosts": list(hosts)}
    return {"type": "fleet", "name": name, "placement": "cluster", "ssh_config": ssh}


# Backends


def test_a_backend_is_made_read_changed_and_deleted(place):
    props = place.at | {"config": place.dstack.aws()}
    made = place.backend.create(props)
    assert made.outs == props
    assert place.backend.read(made.id, props).outs == props
    assert not place.backend.diff(made.id, props, props).changes

    both = props | {"config": props["config"] | {"regions": ["us-east-1", "us-east-2"], "vpc_ids": place.dstack.vpcs}}
    assert not place.backend.diff(made.id, props, both).replaces
    place.backend.update(made.id, props, both)
    assert place.backend.read(made.id, both).outs == both
    drifted = place.backend.read(made.id, props).outs
    assert drifted is not None and drifted["config"]["regions"] == ["us-east-1", "us-east-2"]  # what refresh puts into the state
    assert place.backend.diff(made.id, drifted, props).changes

    plan(Client(place.dstack.url, place.dstack.token), place.name, SPOT)  # the server has it in memory from here on
    place.backend.delete(made.id, both)
    assert place.backend.read(made.id, both).id == ""
    place.backend.delete(made.id, both)  # gone is gone
    with pytest.raises(DstackRefused, match="keeps a deleted backend in memory for five minutes"):
        place.backend.create(props)


def test_a_backend_that_is_there_is_taken_where_it_is_the_same_and_changed_only_on_demand(aws):
    props = aws.at | {"config": aws.dstack.aws()}
    assert aws.backend.create(props).outs == props
    other = props | {"config": props["config"] | {"default_vpcs": True}}
    with pytest.raises(
        DstackRefused, match=r"^backend aws: project resources-aws has one already, with other default_vpcs; to let this stack"
    ):
        aws.backend.create(other)
    assert aws.backend.read("resources-aws/aws", props).outs == props


def test_an_account_on_another_server_or_of_another_cloud_is_another_backend(place):
    props = place.at | {"config": place.dstack.aws()}
    for change in ({"server": "http://127.0.0.1:1"}, {"project": "other"}, {"config": {"type": "gcp"}}):
        assert place.backend.diff("id", props, props | change).replaces == list(change)
    assert place.backend.diff("id", props, props | {"config": rpc.UNKNOWN}).changes


# Fleets of a cloud


def test_a_fleet_that_shrinks_to_nothing_is_made_changed_and_ended(aws):
    props = aws.props(SPOT | {"name": "life"})
    made = aws.fleet.create(props)
    assert aws.fleet.read(made.id, props).outs == made.outs == props
    assert not aws.fleet.diff(made.id, props, props).changes
    assert aws.machines.create(props).outs == props | {"come": True}  # none is wanted before a run wants it

    more = aws.props(props["definition"] | {"nodes": "0..4"})
    difference = aws.fleet.diff(made.id, props, more)
    assert (difference.changes, difference.replaces) == (True, [])
    aws.fleet.update(made.id, props, more)
    assert aws.dstack.api.fleets.get(aws.name, "life").spec.configuration.nodes.max == 4
    assert aws.fleet.read(made.id, more).outs == more

    longer = aws.props(props["definition"] | {"nodes": "0..4", "idle_duration": "2h"})
    assert aws.fleet.diff(made.id, more, longer).replaces == ["definition"]  # dstack changes that of a new fleet alone

    aws.fleet.delete(made.id, more)
    assert aws.fleet.read(made.id, more).id == ""
    aws.fleet.delete(made.id, more)


def test_what_somebody_else_changed_is_seen_and_put_back(aws):
    props = aws.props(SPOT | {"name": "drift"})
    made = aws.fleet.create(props)
    client = Client(aws.dstack.url, aws.dstack.token)
    client.fleets.apply_plan(aws.name, plan(client, aws.name, props["definition"] | {"max_price": 0.5}))
    seen = aws.fleet.read(made.id, props).outs
    assert seen is not None and seen["definition"]["max_price"] == 0.5
    difference = aws.fleet.diff(made.id, seen, props)
    assert (difference.changes, difference.replaces) == (True, [])
    aws.fleet.update(made.id, seen, props)
    assert aws.fleet.read(made.id, props).outs == props


def test_a_fleet_of_the_same_name_is_taken_over_only_on_demand(aws):
    props = aws.props(SPOT | {"name": "theirs"})
    aws.fleet.create(props)
    with pytest.raises(DstackRefused, match=r"^fleet theirs: project resources-aws has a fleet of that name already, .*dstack.adopt true$"):
        aws.fleet.create(props)
    aws.says(adopt=True)
    try:
        assert aws.fleet.create(props).outs == props
        wider = aws.props(props["definition"] | {"nodes": "0..3"})
        assert aws.fleet.create(wider).outs == wider
        with pytest.raises(
            DstackRefused, match=r"^fleet theirs: dstack cannot change its idle_duration in place; first: dstack fleet delete theirs"
        ):
            aws.fleet.create(aws.props(wider["definition"] | {"idle_duration": "2h"}))
    finally:
        aws.says()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"availability_zones": ["us-east-1z"]}, r"without availability_zones: g6.8xlarge in us-east-1, .*L4:24GB:1 \(spot\), \$1/h"),
        ({"instance_types": ["g6.9xlarge"]}, r"without instance_types: m5.large in us-east-1, .*\$0.05/h"),
        ({"max_price": 0.01}, r"without max_price: g6.8xlarge in us-east-1, .*\$1/h"),
        ({"resources": {"gpu": "L4:4", "disk": "200GB.."}}, r"without instance_types: g6.12xlarge in us-east-1, .*\$2.3/h"),
        ({"instance_types": ["p9.huge"], "availability_zones": ["us-east-1z"]}, "without all of these: m5.large in us-east-1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_no_offers_say_what_was_asked_for_where_and_what_nearly_fits_at_which_price(aws, change, message):
    definition = SPOT | {"name": "none"} | change
    with pytest.raises(DstackRefused, match=message) as refused:
        aws.fleet.create(aws.props(definition))
    assert "backends of project resources-aws: aws (us-east-1);" in str(refused.value)
    assert all(str(value) in str(refused.value) for key, value in change.items() if key != "max_price")
    assert aws.fleet.read("", aws.props(definition)).id == ""  # nothing was made


def test_a_project_without_backends_says_so(place):
    with pytest.raises(DstackRefused, match=r"backends of project [\w-]+: none; nothing nearly fits$"):
        place.fleet.create(place.props(SPOT))


# Fleets over SSH, and their machines


@pytest.mark.slow
def test_machines_that_do_not_come_are_told_at_the_deadline_and_the_fleet_can_be_ended(place, capsys):
    props = place.props(onprem("hosts", NEVER))
    made = place.fleet.create(props)
    place.says(timeout=2)
    with pytest.raises(
        DstackRefused, match=r"^fleet hosts: 0 of 1 machines; 127.0.0.77 pending.*: not within 2 s \(flotilla:dstack.timeout\)$"
    ):
        place.machines.create(props)
    assert "fleet hosts: 0 of 1 machines; 127.0.0.77 pending" in capsys.readouterr().out  # said while it waited
    assert place.machines.read("", props).outs == props | {"come": False}
    assert place.machines.diff("", props | {"come": False}, props).changes  # so the next `up` goes on waiting
    place.says()
    place.fleet.delete(made.id, props)
    assert place.dstack.api.fleets.list(place.name) == []


@pytest.mark.slow
def test_a_host_that_dstack_gave_up_on_is_put_in_again_by_the_next_up(place, capsys):
    props = place.props(onprem("hosts", "127.0.0.81", "127.0.0.82"))
    place.fleet.create(props)
    give_up(place, "127.0.0.82")
    first = place.dstack.api.fleets.get(place.name, "hosts")
    assert sorted(instance.status.value for instance in first.instances) == ["pending", "terminated"]
    assert place.machines.read("", props).outs == props | {"come": False}
    again = MachinesProvider()
    again.token, again.settings = place.dstack.token, Dstack(drive=True, timeout=15)
    with pytest.raises(DstackRefused, match="not within 15 s"):
        again.create(props)
    assert "fleet hosts: trying again 127.0.0.82" in capsys.readouterr().out
    there = place.dstack.api.fleets.get(place.name, "hosts")
    assert sorted((instance.hostname, instance.status.value) for instance in there.instances if instance.status.value != "terminated") == [
        ("127.0.0.81", "pending"),
        ("127.0.0.82", "pending"),
    ]


def give_up(place: Place, host: str) -> None:
    """What the server writes after it could not reach a host for a while."""
    [number] = [
        instance.instance_num for instance in place.dstack.api.fleets.get(place.name, "hosts").instances if instance.hostname == host
    ]
    with sqlite3.connect(place.dstack.folder / "data/sqlite.db", timeout=30) as database:
        change = "UPDATE instances SET status = 'TERMINATED', termination_reason = 'PROVISIONING_TIMEOUT' WHERE name = ? AND deleted = 0"
        assert database.execute(change, (f"hosts-{number}",)).rowcount == 1


def test_hosts_come_and_go_in_place_and_another_user_is_another_fleet(place):
    alone, two = place.props(onprem("hosts", "127.0.0.78")), place.props(onprem("hosts", "127.0.0.78", "127.0.0.79"))
    made = place.fleet.create(alone)
    assert place.fleet.read(made.id, alone).outs == alone
    assert place.fleet.diff(made.id, alone, two).replaces == []
    place.fleet.update(made.id, alone, two)
    hosts = place.dstack.api.fleets.get(place.name, "hosts").spec.configuration.ssh_config.hosts
    assert hosts == ["127.0.0.78", "127.0.0.79"]
    other = two["definition"]["ssh_config"] | {"user": "root"}
    assert place.fleet.diff(made.id, two, place.props(two["definition"] | {"ssh_config": other})).replaces == ["definition"]
    with pytest.raises(DstackRefused, match=r"^fleet rivals: .*127.0.0.79.*already assigned to a fleet"):
        place.fleet.create(place.props(onprem("rivals", "127.0.0.79")))


def test_machines_that_the_cloud_has_not_granted_yet_are_no_fleet_yet(place):
    nothing = place.at | {"name": "later", "definition": {}}
    made = place.fleet.create(nothing)
    assert place.machines.create(nothing).outs == nothing | {"come": True}
    assert place.fleet.read(made.id, nothing).id == made.id
    there = place.props(onprem("later", "127.0.0.80"))
    assert place.fleet.diff(made.id, nothing, there).replaces == []
    place.fleet.update(made.id, nothing, there)
    assert place.fleet.read(made.id, there).outs == there


# Runs on a fleet that is to go


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


# Volumes


@pytest.mark.slow
def test_a_volume_is_made_and_deleted(aws):
    definition = {"type": "volume", "name": "kept", "backend": "aws", "region": "us-east-1", "size": "100GB"}
    props = aws.props(definition)
    made = aws.volume.create(props)
    assert aws.volume.read(made.id, props).outs == props
    assert aws.dstack.api.volumes.get(aws.name, "kept").status.value == "active"
    bigger = aws.props(definition | {"size": "200GB"})
    assert aws.volume.diff(made.id, props, bigger).replaces == ["definition"]
    with pytest.raises(DstackRefused, match=r"^volume kept: project resources-aws has a volume of that name already.*adopt true$"):
        aws.volume.create(props)
    aws.says(adopt=True)
    try:
        assert aws.volume.create(props).outs == props
        with pytest.raises(DstackRefused, match=r"^volume kept: cannot be taken over, it has another size$"):
            aws.volume.create(bigger)
    finally:
        aws.says()
    aws.volume.delete(made.id, props)
    assert aws.volume.read(made.id, props).id == ""


@pytest.mark.slow
def test_a_volume_that_cannot_be_made_is_told_and_nothing_is_left(aws):
    definition = {
        "type": "volume",
        "name": "lost",
        "backend": "aws",
        "region": "us-east-1",
        "availability_zone": "us-east-1z",
        "size": "1GB",
    }
    with pytest.raises(DstackRefused, match=r"^volume lost: "):
        aws.volume.create(aws.props(definition))
    assert "lost" not in [volume.name for volume in aws.dstack.api.volumes.list(aws.name)]
    assert parse_apply_configuration(definition)  # the definition itself is in order


# The door


def test_the_token_comes_from_the_stack_else_from_dstacks_own_configuration(dstack, monkeypatch, tmp_path):
    from fleets.server import commands as server

    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(DstackRefused, match=r"^no token for project main on http://[\d.:]+ \(flotilla:dstack\); one comes from"):
        connect(dstack.url, "main", None)
    assert connect(dstack.url, "main", dstack.token).token == dstack.token
    server.login(dstack.folder, "main")
    assert connect(dstack.url, "main", None).token == dstack.token
    assert connect(dstack.url.replace("127.0.0.1", "localhost") + "/", "main", None).token == dstack.token
