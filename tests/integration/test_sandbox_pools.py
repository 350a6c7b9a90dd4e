"""Pools of sandboxes on two nodes of a real cluster: jobs use both, and go on when one is killed."""

from __future__ import annotations

import json
import sqlite3
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from support.sandbox_pools import asking

from cluster_tasks.identity import environment
from lab.local import PROJECT, Cluster, command, render
from lab.waiting import wait_for
from trainer.metrics import read
from trainer.page.record import FILE

pytestmark = [pytest.mark.wide, pytest.mark.skipif(sys.platform != "linux", reason="the local cluster is for Linux")]

FLEET = {"name": "laptop", "nodes": 2, "cpus": 2, "sandboxes": {"number": 4, "warm": 1}}
MODEL = "{model_type: qwen2, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 2}"
LETTERS = r'"characters:abcdefghijklmnopqrstuvwxyz0123456789 >:\n"'
RUN = [
    *("python", "-m", "trainer.train_ppo", "--config", "trainer/recipes/demo-shell.yaml", "trainer.steps=450", "trainer.eval_prompts=2"),
    *(f"model.init={MODEL}", "model.path=null", f"model.tokenizer={LETTERS}", "trainer.prompts_per_step=4", "algorithm.group_size=2"),
    *("data.args={rows: 2000, seed: 2}", "environment.sandbox.memory_mb=64", "environment.sandbox.wait=100"),
    *("environment.args.turns=2", "trainer.checkpoint_every=1000", "log.plot=false", "log.tensorboard=false"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = render(tmp_path_factory.mktemp("pools"), FLEET)
    done = made.local("up")
    assert done.returncode == 0, done.stdout + done.stderr
    yield made
    processes = made.processes()
    made.local("down", "--timeout", "20")
    assert not psutil.wait_procs(processes, timeout=120)[1], "pools end with their cluster"


def pools(cluster: Cluster) -> list[psutil.Process]:
    return [process for process in cluster.processes() if "pool" in command(process) and "--listen" in command(process)]


def load(cluster: Cluster) -> list[dict[str, Any]]:
    token = environment(cluster.root, cluster.url)["RAY_AUTH_TOKEN"]
    request = urllib.request.Request(f"{cluster.url}/flotilla/at/sandboxes/load", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.loads(answer.read())["pools"]


def test_a_job_has_the_sandboxes_of_both_nodes_and_leaves_none(cluster: Cluster) -> None:
    assert "service sandboxes is ready on 2 nodes" in cluster.log("node-0")
    token = environment(cluster.root, cluster.url)["RAY_AUTH_TOKEN"]
    assert not [process for process in cluster.processes() if token in " ".join(command(process))]
    assert token not in cluster.log("node-0") + cluster.log("node-1")
    done = cluster.job("python", "-c", asking(8), flags=PROJECT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ASKED pool {'42\\n'} ['127.0.0.2', '127.0.0.3'] [4, 4]" in done.stdout, done.stdout
    wait_for("the end of all", lambda: [each["in_use"] for each in load(cluster)] == [0, 0], 120)
    assert [(each["room"], each["leases"]) for each in load(cluster)] == [(4, 4), (4, 4)]


@pytest.mark.slow
def test_a_run_whose_pool_and_then_driver_are_killed_learns_every_prompt_once_and_leaves_none(cluster: Cluster) -> None:
    started = cluster.job(*RUN, "run.name=pooled", flags=("--no-wait", "--submission-id", "pooled", *PROJECT))
    assert started.returncode == 0, started.stdout + started.stderr
    folder = cluster.root / "runs/pooled"
    metrics = folder / "metrics.jsonl"
    wait_for("the first steps", lambda: len(metrics.read_text().splitlines()) > 3, 240)
    first, _ = pools(cluster)
    first.kill()
    wait_for("another pool", lambda: first not in pools(cluster) and len(pools(cluster)) == 2, 60)
    steps = len(metrics.read_text().splitlines())
    wait_for("further steps", lambda: len(metrics.read_text().splitlines()) > steps + 3, 240)
    assert all(row.get("reward_failed", 0) == 0 for row in read(folder)[1:])
    with sqlite3.connect(folder / FILE) as database:
        rows = database.execute("SELECT step, prompt, COUNT(*) FROM episodes WHERE kind = '' GROUP BY step, grp").fetchall()
    assert len({prompt for _, prompt, _ in rows}) == len(rows) >= 4 * 6 and {count for *_, count in rows} == {2}
    drivers = [process for process in cluster.processes() if "trainer.train_ppo" in command(process)]
    min(drivers, key=psutil.Process.create_time).kill()  # a child that it has just forked has its words until it has its own
    wait_for("the end of its sandboxes", lambda: [each.get("in_use") for each in load(cluster)] == [0, 0], 120)
    assert all(each["ready"] >= 0 and not each["trouble"] for each in load(cluster))
