"""A job hung on purpose in three ways, on a real Ray cluster of two nodes: `flotilla debug stacks` names who holds it up."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli import debug
from cluster_tasks.debug import gather, stacks
from cluster_tasks.identity import TOKEN, KnownDashboard, environment
from lab.local import Cluster, render
from lab.waiting import wait_for
from stacks.schema import Stack

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the local cluster is for Linux")

ROOT = Path(__file__).parents[2]
FLEET = {"name": "laptop", "nodes": 2, "cpus": 1}
STACK = Stack.model_validate({"name": "local", "cloud": "local", "fleets": [FLEET], "task": {"fleets": ["laptop"]}})


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = render(tmp_path_factory.mktemp("debug"), FLEET)
    (made.root / "env.sh").write_text(f"export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={made.root / TOKEN}\n")
    done = made.local("up")
    assert done.returncode == 0, done.stdout + done.stderr
    yield made
    made.local("down", "--timeout", "20")


def dashboard(cluster: Cluster) -> KnownDashboard:
    return KnownDashboard.of(cluster.url, environment(cluster.root, cluster.url))


@pytest.fixture
def hang(cluster: Cluster) -> Iterator[Hang]:
    hung = Hang(cluster)
    yield hung
    hung.end()


class Hang:
    """Jobs that are stopped when the test is over."""

    def __init__(self, cluster: Cluster):
        self.asked, self.jobs = dashboard(cluster), []

    def __call__(self, way: str) -> None:
        line = f"{sys.executable} {ROOT}/tests/hanging.py {way} {ROOT}"
        name = self.asked.ask("/api/jobs/", {"entrypoint": line})["submission_id"]
        self.jobs.append(name)
        wait_for(f"{name} to hang", lambda: "HUNG" in (self.asked.ask(f"/api/jobs/{name}/logs").get("logs") or ""), 120)

    def end(self) -> None:
        for name in self.jobs:
            self.asked.stop(name)
            wait_for(f"{name} to end", lambda name=name: self.asked.exit_code(name) is not None, 60)


def page(cluster: Cluster, capsys: pytest.CaptureFixture[str], node: str | None = None, everything: bool = False) -> str:
    """What `flotilla debug stacks local` prints."""
    options = argparse.Namespace(all=everything, node=node)
    assert debug.show_stacks(STACK, cluster.root.parents[1], options) == 0
    return capsys.readouterr().out


def test_a_rank_that_sleeps_is_who_the_driver_waits_for(cluster, hang, capsys):
    hang("sleep")

    def seen() -> str:
        said = page(cluster, capsys)
        return said if "2 processes, time.sleep" in said else ""

    said = wait_for("both asleep", seen, 60)
    waits = said.partition("who waits for whom")[2]
    assert "hanging.py" in waits and "waits in ray.get" in waits, said
    assert "sleeper-0 (node " in waits and "in nap, time.sleep at sleep.<locals>.Sleeper.nap" in waits, said
    assert "time.sleep(3600)" in waits


def test_a_rank_that_does_not_come_to_a_collective_is_named(cluster, hang, capsys):
    hang("collective")

    def seen() -> str:
        said = page(cluster, capsys)
        return said if "2 processes, all_reduce" in said else ""

    waits = wait_for("the others to wait", seen, 60).partition("who waits for whom")[2]
    first, second = waits.strip().splitlines()[:2]
    assert "policy-0" in first and "policy-1" in first and "wait in all_reduce" in first and "policy-2" not in first, waits
    assert "for policy-2 (node " in second and "time.sleep" in second and "policy-0" not in second, waits


def test_a_reward_that_does_not_end_is_named_with_its_line(cluster, hang, capsys):
    hang("reward")

    def seen() -> str:
        said = page(cluster, capsys)
        return said if "stuck_reward" in said else ""

    waits = wait_for("the reward", seen, 60).partition("who waits for whom")[2]
    assert "hanging.py (node 0" in waits and "for its own reward scorer (node 0" in waits, waits
    assert "at stuck_reward (" in waits and "tests/hanging.py:" in waits and "time.sleep(3600)" in waits, waits


def test_a_job_of_ours_sees_the_same_where_the_nodes_are_elsewhere_and_all_cpus_are_taken(cluster, hang):
    hang("reward")
    asked = dashboard(cluster)
    nodes = gather.by_job(asked)
    assert sorted(nodes) == ["127.0.0.2", "127.0.0.3"]
    found = stacks.processes(nodes, gather.known(asked))
    [scorer] = [process for process in found if process.role == "scorer"]
    assert scorer.at.startswith("stuck_reward") and scorer.waits_in == "time.sleep"
    assert sum(process.role == "agent" for process in found) == 2
    assert asked.token and asked.token not in json.dumps(nodes)
    assert all(gather.PREFIX not in process.name for process in found), "who looks is not seen"


def test_one_node_alone_and_one_that_is_none(cluster, capsys):
    said = page(cluster, capsys, node="1", everything=True)
    assert "node agent (node 1" in said and "(node 0" not in said
    with pytest.raises(debug.CommandError, match="--node 7: the cluster local has no such node; it has 0, 1"):
        page(cluster, capsys, node="7")
