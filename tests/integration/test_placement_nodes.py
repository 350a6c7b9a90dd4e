"""Two unlike nodes, rendered from one stack and started on this machine: every process of a run is where its settings say."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster_tasks.identity import KnownDashboard, environment
from cluster_tasks.node.dashboard import Dashboard
from cluster_tasks.node.ray import NODE_GPUS
from lab.local import PROJECT, Cluster, render

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the local cluster is for Linux")

LARGE, SMALL = "127.0.0.2", "127.0.0.3"
FLEETS = [
    {"name": "large", "nodes": 1, "cpus": 4, "resources": {"h100": 8}},
    {"name": "small", "nodes": 1, "cpus": 4, "resources": {"v100": 8}},
]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = render(tmp_path, *FLEETS)
    try:
        done = cluster.local("up", "--timeout", "240")
        assert done.returncode == 0, done.stdout + done.stderr
        yield cluster
    finally:
        cluster.local("down", "--timeout", "20")


def homes(dashboard: Dashboard) -> dict[str, str]:
    """Address of the node of every actor that a run named, ended ones too."""
    listed: dict[str, list[dict[str, Any]]] = {
        kind: dashboard.ask(f"/api/v0/{kind}?detail=1&limit=1000")["data"]["result"]["result"] for kind in ("nodes", "actors")
    }
    address = {node["node_id"]: node["node_ip"] for node in listed["nodes"]}
    named = [actor for actor in listed["actors"] if actor["name"] and not actor["name"].startswith("_ray_internal")]
    return {actor["name"]: address[actor["node_id"]] for actor in named}


@pytest.mark.slow
def test_reference_and_rollout_engines_are_on_the_small_gpus_policy_and_critic_on_the_large(cluster: Cluster, tiny_model: Path) -> None:
    settings = [
        f"model.path={tiny_model}",
        "model.dtype=float32",
        "data.path=trainer.data.tasks:sort_digits",
        "data.args={rows: 32, length: 3}",
        "data.max_prompt_tokens=8",
        "algorithm.name=ppo",
        "algorithm.group_size=2",
        "algorithm.kl.coef=0.01",
        "reward.function=digits_share",
        "rollout.engine=hf",
        "rollout.max_new_tokens=5",
        "trainer.steps=1",
        "trainer.prompts_per_step=4",
        "trainer.eval_prompts=0",
        "trainer.micro_batch_tokens=64",
        "placement.gpus_per_rank=0",
        "placement.rank_resources={h100: 1}",
        "placement.reference_resources={v100: 1}",
        "placement.engine_resources={v100: 1}",
        "log.plot=false",
        "log.tensorboard=false",
    ]
    done = cluster.job("python", "-m", "trainer.train_ppo", *settings, flags=PROJECT)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert homes(KnownDashboard.of(cluster.url, environment(cluster.root, cluster.url))) == {
        "policy-0": LARGE,
        "critic-0": LARGE,
        "reference-0": SMALL,
        "rollout-0": SMALL,
    }
    assert "0,0" in cluster.job("printenv", NODE_GPUS).stdout.splitlines(), "checks within a job know what each node should have"
