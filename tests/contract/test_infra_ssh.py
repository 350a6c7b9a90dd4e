"""Hosts over SSH as a site."""

from __future__ import annotations

from ipaddress import ip_network

import pytest

from infra.ssh import build as ssh
from stacks.schema import Stack


def stack(*networks: str | None) -> Stack:
    """One fleet of one host for each network."""
    reached = {"user": "me", "identity_file": "~/.ssh/id"}
    fleets = [
        {"name": f"fleet-{index}", "ssh": reached | {"hosts": [{"hostname": f"h{index}"}], "network": network}}
        for index, network in enumerate(networks)
    ]
    return Stack.model_validate({"name": "test", "cloud": "ssh", "fleets": fleets})


def test_the_site_leaves_this_machine_and_knows_each_fleets_hosts():
    site = ssh.build(stack("10.0.0.0/24", None))
    assert {name: [host.hostname for host in ssh.hosts] for name, ssh in site.ssh.items()} == {"fleet-0": ["h0"], "fleet-1": ["h1"]}


@pytest.mark.parametrize(
    ("networks", "shared"),
    [
        (["10.0.0.0/24"], "10.0.0.0/24"),
        (["10.0.0.0/24", "10.0.0.0/24"], "10.0.0.0/24"),
        (["10.0.0.0/24", "10.0.1.0/24"], None),
        (["10.0.0.0/24", None], None),
        ([None], None),
    ],
)
def test_a_network_is_the_sites_only_where_all_fleets_are_in_it(networks, shared):
    assert ssh.build(stack(*networks)).network == (ip_network(shared) if shared else None)
