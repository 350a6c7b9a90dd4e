"""Backends as Pulumi makes, changes, reads and deletes them, and the token that it shows: against a real server."""

from __future__ import annotations

import pytest
from pulumi.runtime import rpc
from support.dstack_place import SPOT

from infra.dstack_resources.client import Client, DstackRefused, connect
from infra.dstack_resources.spec import plan

pytestmark = pytest.mark.hosts


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


def test_the_token_comes_from_the_stack_else_from_dstacks_own_configuration(dstack, monkeypatch, tmp_path):
    from fleets.server import commands as server

    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(DstackRefused, match=r"^no token for project main on http://[\d.:]+ \(flotilla:dstack\); one comes from"):
        connect(dstack.url, "main", None)
    assert connect(dstack.url, "main", dstack.token).token == dstack.token
    server.login(dstack.folder, "main")
    assert connect(dstack.url, "main", None).token == dstack.token
    assert connect(dstack.url.replace("127.0.0.1", "localhost") + "/", "main", None).token == dstack.token
