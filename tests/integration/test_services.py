"""Services of a stack on a real Ray cluster of two nodes: jobs wait for them, find them, and survive their end."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cluster_tasks.node.ports import free_port
from lab.local import Cluster, command, render
from lab.waiting import wait_for

pytestmark = [pytest.mark.wide, pytest.mark.skipif(sys.platform != "linux", reason="the local cluster is for Linux")]

FLEET = {"name": "laptop", "nodes": 2, "cpus": 1}
ASK = """
import os, ray, urllib.request
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On
ray.init()
@ray.remote(num_cpus=1)
def ask():
    url = os.environ["FLOTILLA_SERVICE_SEARCH"]
    return url, urllib.request.urlopen(url + "/answer").read().decode()
found = ray.get([ask.options(scheduling_strategy=On(node["NodeID"], soft=False)).remote() for node in ray.nodes()])
print("ASKED", len({url for url, _ in found}), {text for _, text in found}, len(os.environ["FLOTILLA_SERVICE_SEARCH_ALL"].split(",")))
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("services")
    (folder / "answer").write_text("42")
    # It takes its time, as an index does that is read first.
    command = f"sleep 3; exec {sys.executable} -m http.server --bind $FLOTILLA_NODE_IP --directory {folder} {{port}}"
    port = free_port()
    services = {"search": {"command": command.format(port=port), "port": port, "health": "/answer"}}
    made = render(folder, FLEET, services=services)
    done = made.local("up")
    assert done.returncode == 0, done.stdout + done.stderr
    yield made
    processes = made.processes()
    made.local("down", "--timeout", "20")
    assert not psutil.wait_procs(processes, timeout=120)[1], "services end with their cluster"


def servers(cluster: Cluster) -> list[psutil.Process]:
    return [process for process in cluster.processes() if "http.server" in command(process)]


def test_jobs_find_the_service_of_their_own_node_ready(cluster: Cluster) -> None:
    assert "service search is ready on 2 nodes" in cluster.log("node-0")
    done = cluster.job("python", "-c", ASK)
    assert done.returncode == 0 and "ASKED 2 {'42'} 2" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_one_that_was_killed_is_started_again(cluster: Cluster) -> None:
    first, second = servers(cluster)
    first.kill()
    wait_for("another", lambda: len({*servers(cluster)} - {first, second}) == 1 and len(servers(cluster)) == 2, 120)
    log = cluster.log("node-0") + cluster.log("node-1")
    assert "service search has ended with code -9" in log
    done = cluster.job("python", "-c", ASK)
    assert done.returncode == 0 and "ASKED" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_a_cluster_whose_service_never_answers_says_which_and_where(tmp_path: Path) -> None:
    with socket.socket() as mute:
        mute.bind(("", 0))  # and does not listen: nobody else answers there either
        services = {"judge": {"command": "exec sleep 1000", "on": "head", "port": mute.getsockname()[1], "timeout": 5}}
        made = render(tmp_path, {"name": "laptop", "nodes": 1, "cpus": 1}, services=services)
        done = made.local("up")
    made.local("down", "--timeout", "10")
    said = done.stdout + done.stderr
    assert done.returncode != 0 and "service judge on 127." in said and "not ready within 5 s" in said, said
