"""Fleets over SSH, and their machines, as Pulumi makes, changes, reads and deletes them: against a real server."""

from __future__ import annotations

import sqlite3
from typing import Any

import pytest
from support.dstack_place import Place

from infra.dstack_resources.client import DstackRefused
from infra.dstack_resources.fleet import MachinesProvider
from stacks.schema import Dstack

pytestmark = pytest.mark.hosts
NEVER = "127.0.0.77"  # of this machine, but for port 9, where nobody listens


def onprem(name: str, *hosts: str) -> dict[str, Any]:
    ssh = {"user": "nobody", "port": 9, "identity_file": "~/.ssh/flotilla", "network": "10.99.0.0/24", "hosts": list(hosts)}
    return {"type": "fleet", "name": name, "placement": "cluster", "ssh_config": ssh}


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
