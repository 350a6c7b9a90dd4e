"""Nodes of an elastic fleet on a real dstack server: they join a cluster that runs, come again after a loss, and leave."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from lab.dstack.hosts import NETWORK
from lab.dstack.lab import Lab
from lab.waiting import wait_for

pytestmark = [pytest.mark.hosts, pytest.mark.usefixtures("tidy")]


@pytest.mark.slow  # of Slurm's nodes a test is quicker: slurm/test_flotilla.py
def test_a_node_joins_comes_again_after_its_container_was_killed_and_leaves(lab: Lab):
    ssh = {"user": "root", "identity_file": str(lab.folder / "key"), "network": f"{NETWORK}.0/24"}
    machine = {"cpus": 1, "memory": "1GB..", "disk": "100MB.."}
    first, second = (machine | {"ssh": ssh | {"hosts": [{"hostname": host.address}]}} for host in lab.hosts)
    lab.stack(fleets=[first | {"name": "lab"}, second | {"name": "spot", "role": "rollout", "nodes": "0..1"}])
    lab.fleet()
    wait_for("a host that is free for another fleet", lambda: len(lab.instances()) == 1, 240, 0.5)

    def nodes(count: int) -> Callable[[], bool]:
        return lambda: json.loads(lab.user("python -m cli status lab --json 2>/dev/null").stdout)["ray_nodes"] == count

    try:
        done = lab.user("python -m cli up lab", timeout=600)
        assert done.returncode == 0 and nodes(1)(), done.stdout
        said = lab.must("python -m cli scale lab spot=1")
        assert "$ dstack apply -y -d -n ray-spot-0 -f build/lab/spot.rollout.dstack.yml" in said
        wait_for("its node", nodes(2), 240)
        assert "elastic spot  ray-spot-0  running" in lab.must("python -m cli status lab")
        lab.hosts[1].docker("kill", *lab.hosts[1].containers())
        wait_for("its loss", nodes(1), 240)
        wait_for("its return", nodes(2), 300)
        lab.must("python -m cli scale lab spot=0")
        wait_for("its end", nodes(1), 240)
        wait_for("its last words", lambda: "draining this node" in lab.logs("ray-spot-0"), 240, 1)
        wait_for("the end of its run", lambda: "ray-spot-0" not in lab.runs(), 240, 1)
    finally:
        done = lab.user("python -m cli down lab --keep-machines", timeout=300)
        lab.must("dstack fleet delete -y spot")
        wait_for("the end of fleet spot", lambda: "spot" not in lab.must("dstack fleet list"), 240, 1)
        lab.stack()
        lab.fleet()
        wait_for("both hosts", lambda: lab.instances() == ["idle", "idle"], 240, 0.5)
    assert done.returncode == 0, done.stdout
