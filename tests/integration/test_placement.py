"""Shares of bundles as Ray itself counts them: every process that was planned finds its place."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from support.ray_actors import local_ray

from cluster_tasks.node.ports import port_answers
from cluster_tasks.node.ray import ray_command
from cluster_tasks.node.settings import read_settings
from lab.waiting import wait_for
from trainer.cluster import on_ray, placement
from trainer.cluster.actors import free_port
from trainer.cluster.reservation import reserve
from trainer.configs.ppo import PpoConfig

pytestmark = pytest.mark.wide


@pytest.fixture
def cluster():
    with local_ray(8, resources={"big": 2, "l4": 1}):
        yield


@pytest.fixture
def cluster_of_domains():
    """Two nodes in each of two NVLink domains, and one in none."""
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    for domain in "abab":
        found.add_node(num_cpus=1, labels={placement.DOMAIN: domain})
    try:
        ray.init(address=found.address)
        yield
    finally:
        ray.shutdown()
        found.shutdown()


@ray.remote
class Process:
    def environment(self) -> dict[str, str]:
        return dict(os.environ)


@pytest.mark.parametrize(
    "settings",
    [
        {"colocate": True, "engine_resources": {"l4": 0.5}, "rank_resources": {"big": 1}},
        pytest.param(
            {
                "colocate": True,
                "cpus_per_rank": 2,
                "cpus_per_engine": 0.3,
                "rank_resources": {"big": 0.7},
                "engine_resources": {"big": 0.1},
            },
            marks=pytest.mark.slow,
        ),
        {"cpus_per_rank": 2, "cpus_per_engine": 0.5, "engine_resources": {"l4": 0.5}},
    ],
)
def test_all_roles_and_rollout_engines_find_their_place(cluster, settings):
    config = PpoConfig.model_validate(
        {
            "model": {"path": "m"},
            "data": {"path": "a:b"},
            "rollout": {"engines": 2},
            "placement": {"ranks": 2, "gpus_per_rank": 0, "wait": 20} | settings,
        }
    )
    wanted = placement.plan(config)
    placement.check(wanted, [node["Resources"] for node in ray.nodes()], config.placement)
    reserved = reserve(wanted, config.placement)
    roles, process = ("policy", "critic", "reference"), _remote(Process)
    started = [
        process.options(**on_ray.options(reserved.bundle(rank), placement.rank_share(config, len(roles)), 1, f"{role}-{rank}")).remote()
        for role in roles
        for rank in range(2)
    ] + [
        process.options(
            **on_ray.options(reserved.bundle(wanted.engine_bundle(i)), placement.engine_share(config), 1, f"rollout-{i}")
        ).remote()
        for i in range(2)
    ]
    environments = on_ray.wait([actor.environment.remote() for actor in started], 60, "a process that found no room in its bundle")
    assert all(environment["CUDA_VISIBLE_DEVICES"] == "" for environment in environments)
    reserved.release()


@pytest.mark.slow
def test_ray_keeps_the_nodes_of_each_engine_in_one_domain(cluster_of_domains):
    """Bundles that were only packed would be on nodes of both domains, or of none, as the ranks ask for so little."""
    split = {"engines": 2, "tensor_parallel": 2, "nodes_per_engine": 2}
    values = {"model": {"path": "m"}, "data": {"path": "a:b"}, "rollout": split, "placement": {"gpus_per_rank": 0, "wait": 20}}
    config = PpoConfig.model_validate(values)
    wanted = placement.fit(config, ray.nodes())
    reserved = reserve(wanted, config.placement)
    domains = {node["NodeID"]: node["Labels"].get(placement.DOMAIN) for node in ray.nodes()}
    nodes = {}
    for engine in range(2):
        for node in range(2):
            group, index = reserved.places[wanted.engine_bundle(engine, node, 2)]
            nodes[engine, node] = ray.util.placement_group_table(group)["bundles_to_node_id"][index]
    assert [{domains[nodes[engine, node]] for node in range(2)} for engine in range(2)] in ([{"a"}, {"b"}], [{"b"}, {"a"}])
    assert len({*nodes.values()}) == 4
    with pytest.raises(TimeoutError, match=r"placement\.wait: 2 bundles .* were not free within 1 s"):
        reserve(wanted, config.placement.model_copy(update={"wait": 1}))
    reserved.release()
    again = reserve(wanted, config.placement)
    again.release()


@pytest.mark.slow
def test_ray_takes_the_label_that_the_node_agent_gives_it(monkeypatch):
    """Keys that begin with ray.io/ are Ray's own, and it could refuse them."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    settings = read_settings([], {"DSTACK_NODE_RANK": "0", "DSTACK_NODES_IPS": "127.0.0.1"})
    [label] = [flag for flag in ray_command(settings, "2fd1c1b6-27c5-4b1b-9bd0-1c4f4d8a6e7f.32766") if flag.startswith("--labels=")]
    port, ray_itself = free_port(), str(Path(sys.executable).with_name("ray"))
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:  # short, for its sockets
        flags = [f"--port={port}", "--num-cpus=1", "--include-dashboard=false", f"--temp-dir={folder}", label]
        with subprocess.Popen([ray_itself, "start", "--head", "--block", *flags], stdout=subprocess.DEVNULL) as node:
            try:
                wait_for("Ray", lambda: port_answers("127.0.0.1", port), 60)
                ray.init(address=f"127.0.0.1:{port}", log_to_driver=False)
                assert placement.domains(ray.nodes()).keys() == {"2fd1c1b6-27c5-4b1b-9bd0-1c4f4d8a6e7f.32766"}
            finally:
                ray.shutdown()
                node.terminate()


def _remote(actor: Any) -> Any:
    """Ray's decorator is not in its type stubs."""
    return actor
