"""Two unlike nodes, rendered from one stack and started on this machine: every process of a run is where its settings say."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster_tasks.node.dashboard import Dashboard
from cluster_tasks.node.ports import free_port
from cluster_tasks.ray import NODE_AGENT, ray_cluster
from infra.site import Site
from stacks.schema import Stack

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the local cluster is for Linux")

ROOT = Path(__file__).parents[2]
LARGE, SMALL = "127.0.0.2", "127.0.0.3"
FLEETS = [
    {"name": "large", "nodes": 1, "cpus": 4, "resources": {"h100": 8}},
    {"name": "small", "nodes": 1, "cpus": 4, "resources": {"v100": 8}},
]


@pytest.fixture
def dashboard(tmp_path: Path) -> Iterator[Dashboard]:
    port = free_port()
    task = {"fleets": ["large", "small"], "dashboard_port": port}
    stack = Stack.model_validate({"name": "local", "cloud": "local", "fleets": FLEETS, "task": task})
    root = tmp_path / "build/local"
    root.mkdir(parents=True)
    (tmp_path / "requirements").mkdir()
    shutil.copy(ROOT / "requirements/cpu.txt", tmp_path / "requirements")
    shutil.copytree(NODE_AGENT, root / NODE_AGENT.name)
    file = root / "ray-cluster.dstack.yml"
    file.write_text(yaml.safe_dump(ray_cluster(stack, Site(leaves_machine=False)), sort_keys=False, width=1000))
    local = [sys.executable, "-m", "cluster_tasks.local"]
    try:
        done = subprocess.run(
            [*local, "up", str(file), "--timeout", "240"], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        yield Dashboard(f"http://127.0.0.1:{port}", None)
    finally:
        subprocess.run([*local, "down", str(file), "--timeout", "20"], cwd=ROOT, capture_output=True, timeout=120, check=False)


def homes(dashboard: Dashboard) -> dict[str, str]:
    """Address of the node of every actor that a run named, ended ones too."""
    listed: dict[str, list[dict[str, Any]]] = {
        kind: dashboard.ask(f"/api/v0/{kind}?detail=1&limit=1000")["data"]["result"]["result"] for kind in ("nodes", "actors")
    }
    address = {one["node_id"]: one["node_ip"] for one in listed["nodes"]}
    named = [one for one in listed["actors"] if one["name"] and not one["name"].startswith("_ray_internal")]
    return {one["name"]: address[one["node_id"]] for one in named}


def test_reference_and_samplers_are_on_the_small_gpus_policy_and_critic_on_the_large(dashboard: Dashboard, tiny_model: Path) -> None:
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
        "placement.sampler_resources={v100: 1}",
        "log.plot=false",
        "log.tensorboard=false",
    ]
    ray = str(Path(sys.executable).with_name("ray"))
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    excludes = '{"excludes": ["/.git/", "/.venv/", "/build/", "/tests/"]}'
    submit = [ray, "job", "submit", "--address", dashboard.url, "--working-dir", ".", "--runtime-env-json", excludes, "--"]
    command = [*submit, "python", "-m", "trainer.train_ppo", *settings]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert homes(dashboard) == {"policy-0": LARGE, "critic-0": LARGE, "reference-0": SMALL, "sampler-0": SMALL}
