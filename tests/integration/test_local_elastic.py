"""Nodes of an elastic fleet on this machine: they join a cluster on which a run trains, die, come again, and leave."""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from support import recorded
from support.configs import settings

from cli.places import local
from cluster_tasks.local.plan import ray_folder
from lab.local import PROJECT, Cluster, command, render
from lab.waiting import wait_for
from stacks.schema import Stack
from trainer.configs.sections import values_read
from trainer.data.tasks import sort_digits
from trainer.metrics import read
from trainer.online import elastic

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the local cluster is for Linux")

FLEETS = {"name": "laptop", "nodes": 1, "cpus": 2}, {"name": "spot", "role": "rollout", "nodes": "0..2", "cpus": 1}
ROWS = {"rows": 20_000, "length": 8}  # more than are learned meanwhile


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = render(tmp_path, *FLEETS)
    done = cluster.local("up")
    assert done.returncode == 0, done.stdout + done.stderr
    yield cluster
    cluster.local("down", "--timeout", "20")


def serving(run: Path) -> dict[str, dict[str, Any]]:
    """Engines on elastic nodes that have answered, by name."""
    file = run / elastic.FILE
    rows = json.loads(file.read_text())["engines"] if file.exists() else []
    return {row["name"]: row for row in rows if row["fleet"] == "spot" and row["tokens_per_second"] > 0}


def scaled(cluster: Cluster, count: int) -> None:
    done = cluster.scale(f"spot={count}")
    assert done.returncode == 0, done.stdout + done.stderr


def status(root: Path, capsys: pytest.CaptureFixture[str], as_json: bool) -> Any:
    """What `flotilla status` prints about the stack, for programs or line by line."""
    capsys.readouterr()
    token = root / "build/local/ray.token"
    token.with_name("env.sh").write_text(f"export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={token}\n")  # what of it counts here
    stack = Stack.model_validate({"name": "local", "cloud": "local", "fleets": FLEETS, "monitoring": {"price": 1.5}})
    with contextlib.chdir(root):
        assert local.status(stack, root, as_json) == 0
    out = capsys.readouterr().out
    return json.loads(out) if as_json else out.splitlines()


@pytest.mark.slow
def test_a_run_trains_on_while_nodes_join_die_come_again_and_leave(cluster: Cluster, tiny_model: Path, tmp_path: Path, capsys) -> None:
    config = settings(
        tiny_model,
        rollout={"mode": "async", "elastic": True, "max_sequences": 8, "max_new_tokens": 40},
        trainer={"steps": 2000, "checkpoint_every": 1000, "micro_batch_tokens": 512, "export_every": None},
        data={"args": ROWS, "max_prompt_tokens": 16},
        log={"tensorboard": False, "plot": False, "episodes": 32},
        placement={"gpus_per_rank": 0, "wait": 60},
        run={"name": "words"},
    )
    file, run = tmp_path / "run.yaml", cluster.root / "runs/words"
    file.write_text(yaml.safe_dump(values_read(config)))
    line = ("python", "-m", "trainer.train_ppo", "--config", str(file))
    submitted = cluster.job(*line, flags=("--no-wait", "--submission-id", "words", *PROJECT))
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    metrics = run / "metrics.jsonl"
    wait_for("the first steps", lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 3, 180)
    assert not serving(run)
    refused = cluster.scale("spot=3")
    assert (refused.returncode, refused.stdout) == (2, "spot=3: fleet spot may have 0 to 2 nodes (flotilla:fleets[].nodes)\n")

    scaled(cluster, 1)
    wait_for("an engine on the new node", lambda: serving(run), 120)
    [first] = serving(run)
    shown = status(tmp_path, capsys, as_json=True)
    assert shown["elastic"] == [{"fleet": "spot", "name": "127.0.0.101", "state": "ALIVE", "price": 1.5}]
    stays, came = shown["engines"]
    assert (stays["name"], stays["node"], stays["price"]) == ("rollout-0", None, None)
    assert (came["name"], came["node"], came["run"], came["price"]) == (first, "127.0.0.101", "words", 1.5) and came["version"] > 2
    lines = status(tmp_path, capsys, as_json=False)
    assert "elastic spot  127.0.0.101  ALIVE  1.50 USD/h" in lines
    assert any(line.startswith(f"engine {first}  on 127.0.0.101  run words  weights ") for line in lines)
    temp = str(ray_folder(cluster.root) / "101")
    found = [p for p in psutil.process_iter() if command(p)[0].endswith("/raylet") and temp in " ".join(command(p))]
    min(found, key=psutil.Process.create_time).kill()  # a child that it has just forked has its words until it has its own
    wait_for("an engine on the node that came again", lambda: serving(run) and first not in serving(run), 180)

    scaled(cluster, 0)
    wait_for("no engine on a node that left", lambda: not serving(run), 60)
    steps = read(run)[-1]["step"]
    wait_for("steps after it", lambda: read(run)[-1]["step"] > steps + 3, 120)
    assert cluster.local("status").returncode == 0
    learned = Counter(row["prompt"] for row in recorded.groups(run))
    assert learned <= Counter(row["prompt"] for row in sort_digits(**ROWS)), "every prompt is learned from once at most"
