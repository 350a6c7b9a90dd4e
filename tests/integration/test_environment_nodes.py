"""Environments on nodes of their own: a fleet of the stack has a resource that the processes which play episodes ask for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lab.local import PROJECT, Cluster, command, render
from lab.waiting import wait_for
from trainer.metrics import read

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the local cluster is for Linux")

FLEETS = {"name": "ranks", "nodes": 1, "cpus": 2}, {"name": "players", "nodes": 1, "cpus": 1, "resources": {"cpu_node": 2}}
MODEL = "{model_type: qwen2, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 2}"
RUN = [
    *("python", "-m", "trainer.train_ppo", "--config", "trainer/recipes/demo-guess.yaml", "run.name=apart", "trainer.steps=100000"),
    *(f"model.init={MODEL}", "model.path=null", "model.tokenizer=characters:0123456789+-?", "trainer.eval_prompts=8"),
    *("trainer.prompts_per_step=4", "rollout.max_sequences=32", "placement.threads=1", "log.plot=false", "log.tensorboard=false"),
]


@pytest.mark.slow
def test_episodes_are_played_on_the_nodes_that_have_what_they_ask_for(tmp_path: Path) -> None:
    cluster = render(tmp_path, *FLEETS)
    done = cluster.local("up")
    assert done.returncode == 0, done.stdout + done.stderr
    try:
        refused = cluster.job(*RUN, "environment.resources={cpu_nodes: 1}", flags=PROJECT)
        assert refused.returncode != 0
        assert "environment.resources.cpu_nodes=1: each process that plays episodes takes that much cpu_nodes of its node" in refused.stdout
        asked = ["environment.resources={cpu_node: 1}", "environment.workers=2"]
        started = cluster.job(*RUN, *asked, flags=("--no-wait", *PROJECT))
        assert started.returncode == 0, started.stdout + started.stderr
        metrics = cluster.root / "runs/apart/metrics.jsonl"
        wait_for("the first steps", lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 3, 180)
        players, engines = (_nodes(cluster, kind) for kind in ("EnvironmentActor", "RolloutActor"))
        assert (len(players), len(engines)) == (2, 1)
        assert players[0] == players[1] != engines[0]
        assert all(row["turns"] >= 1 for row in read(metrics.parent)[1:])
    finally:
        cluster.local("down", "--timeout", "20")


def _nodes(cluster: Cluster, kind: str) -> list[int]:
    """Of each actor of this class its node's raylet, which has started it."""
    workers = [process for process in cluster.processes() if command(process)[0].startswith(f"ray::{kind}")]
    return [next(parent.pid for parent in worker.parents() if command(parent)[0].endswith("/raylet")) for worker in workers]
