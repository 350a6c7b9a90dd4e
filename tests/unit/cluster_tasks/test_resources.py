"""Custom Ray resources of fleets and hosts, from the stack file to what a node tells Ray."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from cluster_tasks import ray
from cluster_tasks.node.ray import ray_command
from cluster_tasks.node.settings import read_settings
from fleets.fleet import fleet as dstack_fleet
from stacks import load
from stacks.load import StackError
from stacks.schema import Stack
from stacks.site import Site

HOSTS = [
    {"hostname": "gpu1", "internal_ip": "10.0.0.1"},
    {"hostname": "gpu2", "internal_ip": "10.0.0.2", "resources": {"nvme": 4, "v100": 2}},
]
FLEET = {"name": "gpus", "resources": {"v100": 8}, "ssh": {"user": "me", "identity_file": "~/.ssh/id", "hosts": HOSTS}}


def stack(fleet: dict[str, Any]) -> Stack:
    return load.parse("onprem", {"flotilla:cloud": "ssh", "flotilla:fleets": [fleet]})


@pytest.mark.parametrize(("rank", "expected"), [(0, {"v100": 8}), (1, {"v100": 2, "nvme": 4})])
def test_each_node_offers_the_fleets_resources_and_its_own(rank: int, expected: dict[str, float]) -> None:
    command = ray.ray_cluster(stack(FLEET), Site())["commands"][-1]
    flags = shlex.split(command)[3:]  # exec python3 node
    env = {"DSTACK_NODE_RANK": str(rank), "DSTACK_NODES_IPS": "10.0.0.1\n10.0.0.2"}
    [given] = [flag for flag in ray_command(read_settings(flags, env)) if flag.startswith("--resources=")]
    assert json.loads(given.partition("=")[2]) == expected


def test_dstack_is_told_nothing_of_them() -> None:
    given = stack(FLEET)
    ssh = given.fleets[0].ssh
    assert ssh is not None
    assert "v100" not in json.dumps(dstack_fleet(given, Site(ssh={"gpus": ssh}), given.fleets[0]))


MISTAKES = [
    ({"hostname": "a", "resources": {"v100": 1}}, "fleets[0].ssh.hosts[0].internal_ip: is missing; it is how the node knows"),
    ({"hostname": "a", "internal_ip": "10.0.0.1", "resources": {"GPU": 1}}, "fleets[0].ssh.hosts[0].resources.GPU: Ray counts this itself"),
    (
        {"hostname": "a", "internal_ip": "10.0.0.1", "resources": {"v100": 0}},
        "fleets[0].ssh.hosts[0].resources.v100: 0 is not a number > 0",
    ),
]


@pytest.mark.parametrize(("host", "message"), MISTAKES)
def test_a_mistake_names_the_setting_and_what_is_allowed(host: dict[str, Any], message: str) -> None:
    with pytest.raises(StackError) as error:
        stack({"name": "gpus", "ssh": {"user": "me", "identity_file": "~/.ssh/id", "hosts": [host]}})
    assert f"flotilla:{message}" in str(error.value)


@pytest.mark.parametrize(("flag", "text"), [("--resources", "v100=8"), ("--host-resources", "{"), ("--host-resources", "[1]")])
def test_the_agent_refuses_what_is_no_map(flag: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"{flag} .* is not JSON"):
        read_settings([flag, text, "--rank", "0", "--addresses", "127.0.0.2"], {})
