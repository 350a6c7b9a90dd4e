"""Fleets with role: rollout: their files for dstack and Slurm, the head's note by which their nodes find it, and what scale refuses."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.dstack_answers import served

from cli import budget, scale
from cli.places import dstack as driven
from cli.places.protocol import Up
from cluster_tasks import slurm
from cluster_tasks.client.elastic import Elastic as Serving
from cluster_tasks.client.elastic import ElasticNode
from cluster_tasks.local.supervisor import Elastic, NodeProcess
from cluster_tasks.node.dashboard import Dashboard
from cluster_tasks.node.elastic import own_address
from cluster_tasks.node.errors import Failure, Stopped
from cluster_tasks.node.meeting import head_of, note_of, noted
from cluster_tasks.node.ray import ray_command
from cluster_tasks.node.settings import read_settings
from cluster_tasks.ray import ray_cluster, rollout_node
from fleets.fleet import fleet
from lab.waiting import wait_for
from stacks.dstack_api import TaskConfiguration, parse_apply_configuration
from stacks.errors import UserError
from stacks.host.change import parse_change
from stacks.load import load
from stacks.schema import Stack
from stacks.site import Site

PROJECT = Path(__file__).parents[4]
AWS = Site(backends=({"type": "aws", "regions": ["us-east-1"], "creds": {"type": "default"}},))
GPUS = {"name": "gpus", "nodes": 2, "cpus": 96, "gpu": {"name": "H100", "count": 8}}
ROLLOUT = {"name": "rollout", "role": "rollout", "nodes": "1..6", "cpus": 32, "gpu": {"name": "L40S", "count": 4}}


def stack(cloud: str = "aws", **settings: Any) -> Stack:
    shared = {"checkpoints": {"kind": "shared", "path": "/shared/me"}}
    return Stack.model_validate({"name": "test", "cloud": cloud, "fleets": [GPUS, ROLLOUT]} | shared | settings)


def test_a_cluster_and_its_head_count_the_nodes_of_the_cluster_alone() -> None:
    task = ray_cluster(stack(), AWS)
    assert task["nodes"] == 2
    assert "rollout" not in json.dumps(task)


def test_dstack_gets_a_fleet_that_shrinks_to_nothing_and_a_task_of_one_node_that_it_retries() -> None:
    given = stack(fleets=[GPUS, ROLLOUT | {"capacity": {"kind": "spot"}}])
    machines = fleet(given, AWS, given.fleets[1])
    parse_apply_configuration(machines)
    assert (machines["placement"], machines["nodes"]) == ("any", "0..6")
    task = parse_apply_configuration(rollout_node(given, AWS, given.fleets[1]))
    assert isinstance(task, TaskConfiguration)
    assert (task.nodes, [getattr(named, "name", named) for named in task.fleets or ()], task.spot_policy) == (1, ["rollout"], "spot")
    assert task.commands[-1].endswith("--stack test --num-cpus 32 --join ray --fleet rollout --spot imdsv2")
    assert task.retry and not isinstance(task.retry, bool)
    assert {event.value for event in task.retry.on_events or ()} == {"no-capacity", "interruption", "error"}


def test_slurm_gets_an_array_of_nodes_in_a_partition_of_their_own(tmp_path: Path) -> None:
    given = stack("slurm", fleets=[GPUS, ROLLOUT | {"slurm": {"partition": "preempt"}}], slurm={"partition": "gpu", "requeue": 0})
    scripts = slurm.scripts(given, Site())
    script = scripts["rollout.rollout.sbatch"]
    options = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")]
    assert {"array=0-5", "nodes=1", "requeue", "partition=preempt", "gpus-per-node=l40s:4"} <= {*options}
    assert len(options) == len({option.partition("=")[0] for option in options})  # each once
    assert '--fleet=rollout "--join=$1"' in script
    assert "rollout" not in scripts["ray-cluster.sbatch"]
    file = tmp_path / "script"
    file.write_text(script)
    subprocess.run(["bash", "-n", str(file)], check=True, timeout=20)


def test_an_elastic_node_has_labels_and_the_address_from_which_it_reaches_the_head(tmp_path: Path) -> None:
    settings = read_settings(["--join", "ray", "--fleet", "rollout"], {"FLOTILLA_RUNS": str(tmp_path)})
    settings.rank, settings.addresses = 1, ["127.0.0.2", own_address("127.0.0.2", 6379)]
    command = ray_command(settings)
    assert "--labels=flotilla.role=rollout,flotilla.fleet=rollout" in command
    assert {"--node-ip-address=127.0.0.1", "--address=127.0.0.2:6379"} <= {*command}


@pytest.mark.parametrize(
    ("words", "env", "message"),
    [
        (["--join", "ray"], {"FLOTILLA_RUNS": "/x"}, "it needs --fleet"),
        (["--join", "ray", "--fleet", "a", "--job", "x"], {"FLOTILLA_RUNS": "/x"}, "takes neither --job nor --torchrun"),
        (["--join", "ray", "--fleet", "a"], {}, "--join needs FLOTILLA_RUNS"),
    ],
)
def test_an_elastic_node_refuses_what_is_not_for_it(words: list[str], env: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_settings(words, env)


@pytest.mark.parametrize(("error", "stays"), [(None, False), (Stopped(), False), (Failure(75, "lost"), True)])
def test_the_heads_note_stays_where_the_head_is_to_come_back(tmp_path, monkeypatch, error: Exception | None, stays: bool) -> None:
    monkeypatch.setenv("FLOTILLA_RUNS", str(tmp_path))
    monkeypatch.setenv("DSTACK_RUN_NAME", "ray")
    settings = read_settings(["--rank", "0", "--addresses", "10.0.0.5", "--port", "7000"], {})
    assert head_of("ray") is None
    try:
        with noted(settings):
            assert head_of("ray") == ("10.0.0.5", 7000)
            if error:
                raise error
    except (Stopped, Failure):
        pass
    assert note_of("ray").exists() == stays
    note_of("ray").write_text('{"addr')  # half written
    assert head_of("ray") is None


def test_the_supervisor_runs_as_many_nodes_as_the_file_says_and_starts_a_dead_one_again(tmp_path: Path) -> None:
    """In a process of its own, whose children are these nodes alone."""
    code = f"""
import os, signal, time
from pathlib import Path
from cluster_tasks.local import supervisor
from cluster_tasks.local.supervisor import Elastic, NodeProcess, reap
supervisor.AGAIN_SECONDS = 0.2
env, log = {{"PATH": os.environ["PATH"]}}, "{tmp_path}/log"
nodes = [NodeProcess(i, ["sleep", "60"], env, "{tmp_path}", log, "rollout") for i in range(3)]
file = Path("{tmp_path}/scale.json")
elastic = Elastic(nodes, file)
def until(count):
    end = time.monotonic() + 60
    while len(elastic.running) != count or elastic.stopping:
        assert time.monotonic() < end, elastic
        elastic.poll(time.monotonic()); reap({{}}, {{}}, elastic); time.sleep(0.02)
elastic.poll(time.monotonic()); assert not elastic.running
file.write_text('{{"rollout": 2}}'); until(2)
[first, second] = elastic.running
os.kill(first, signal.SIGKILL)
while first in elastic.running: reap({{}}, {{}}, elastic); time.sleep(0.02)
until(2); assert second in elastic.running
file.write_text('{{"rollout": 0}}'); until(0)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, cwd=Path(__file__).parents[4])


def test_a_node_that_ignores_its_end_is_killed(tmp_path: Path) -> None:
    elastic = Elastic(
        [NodeProcess(0, ["sh", "-c", f"trap '' TERM; touch {tmp_path}/deaf; while :; do sleep 1; done"], {}, ".", "/dev/null", "a")],
        tmp_path / "none",
    )
    process = subprocess.Popen(elastic.nodes[0].command, start_new_session=True)
    elastic.running[process.pid] = elastic.nodes[0]
    wait_for("it to ignore SIGTERM", (tmp_path / "deaf").exists, 60)
    now = time.monotonic()
    elastic.poll(now)
    elastic.poll(now + 1000)
    assert process.wait(60) == -9


@pytest.mark.parametrize(
    ("name", "count", "message"),
    [
        ("rolout", 2, "has no elastic fleet rolout; did you mean rollout"),
        ("gpus", 2, "gpus has role: cluster, whose nodes start and end together"),
        ("rollout", 7, "gives fleet rollout 1 to 6 nodes"),
        ("rollout", 0, "gives fleet rollout 1 to 6 nodes"),
    ],
)
def test_scale_refuses_what_the_stack_does_not_have(name: str, count: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        scale.checked(stack(), name, count)


def test_a_budget_bounds_what_is_rendered_and_what_scale_starts() -> None:
    given = stack("slurm", fleets=[GPUS, ROLLOUT | {"hourly_budget": 10}], monitoring={"price": 2.5})
    assert given.most(given.fleets[1]) == 4
    assert "#SBATCH --array=0-3\n" in slurm.scripts(given, Site())["rollout.rollout.sbatch"]
    assert "FLOTILLA_FLEET_NODES=1..4" in rollout_node(given, Site(), given.fleets[1])["env"]
    assert fleet(given, AWS, given.fleets[1])["nodes"] == "0..4"
    budget.affordable(given, given.fleets[1], 4, *budget.price(given, given.fleets[1]))
    costs = r"rollout=5: 5 nodes cost 12.50 USD an hour, 2.50 each by flotilla:monitoring.price, but stacks/Pulumi.test.yaml gives fleet "
    with pytest.raises(UserError, match=costs + r"rollout 10.00 \(flotilla:fleets\[\].hourly_budget\), which pays for 4"):
        budget.affordable(given, given.fleets[1], 5, *budget.price(given, given.fleets[1]))


def test_on_a_cloud_the_list_price_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUHUNT_CATALOG_URL", "http://127.0.0.1:9")  # no catalogue but the list that comes with the project
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    machines = "machine: g6.8xlarge, capacity: {kind: spot}"
    (tmp_path / "stacks").mkdir()
    (tmp_path / "infra").symlink_to(PROJECT / "infra")
    (tmp_path / "Pulumi.yaml").write_text((PROJECT / "Pulumi.yaml").read_text())
    (tmp_path / "stacks/Pulumi.test.yaml").write_text(
        f"""config:
  flotilla:cloud: aws
  flotilla:region: us-east-1
  flotilla:dstack: {{host: elsewhere}}
  flotilla:checkpoints: {{kind: bucket}}
  flotilla:fleets:
    - {{name: gpus, nodes: 1, machine: g6.8xlarge}}
    - {{name: rollout, role: rollout, nodes: 0..8, hourly_budget: 10, {machines}}}
"""
    )
    given = load("test", tmp_path)
    each, source = budget.price(given, given.fleets[1])
    assert 1 < each < 5 and source.startswith("list prices of 20")
    with pytest.raises(UserError, match=rf"rollout=8: 8 nodes cost .* list prices of .* which pays for {int(10 / each)}$"):
        budget.require(given, [(given.fleets[1], 8)])
    budget.require(given, [(given.fleets[1], 0)])
    file = tmp_path / "stacks/Pulumi.test.yaml"
    file.write_text(file.read_text().replace("nodes: 0..8", "nodes: 8..9"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="rollout=8: 8 nodes cost"):
        driven.up(load("test", tmp_path), tmp_path, Up())


@pytest.mark.parametrize("text", ["rollout", "rollout=", "rollout=-1", "rollout=two", "=2", "rollout=1.5"])
def test_a_change_is_a_fleet_and_a_number(text: str) -> None:
    with pytest.raises(UserError, match="is not FLEET=N"):
        parse_change(text)
    assert parse_change("rollout=3") == ("rollout", 3)


def test_status_names_a_fleet_with_fewer_nodes_than_it_is_to_have() -> None:
    found = Serving.of(stack(), [], None)
    assert found.short == ["fleet rollout has 0 of at least 1 nodes"]
    assert found.lines() == ["not healthy: fleet rollout has 0 of at least 1 nodes"]
    assert not Serving.of(stack(), [ElasticNode("rollout", "ray-rollout-0", "running", None)], None).short


def test_status_shows_the_engines_of_jobs_that_run_now_and_what_each_costs() -> None:
    stays = {"name": "rollout-0", "node": None, "fleet": None, "version": 12, "tokens_per_second": 1234.5, "in_flight": 8}
    first = {"name": "elastic-3", "node": "10.0.0.7", "fleet": "rollout", "version": 11, "tokens_per_second": 80.0, "in_flight": 2}
    rows = [stays, first, first | {"name": "e"}]
    jobs = [{"submission_id": name, "status": state, "driver_node_id": "n"} for name, state in (("now", "RUNNING"), ("old", "FAILED"))]
    pages = {"/api/jobs/": [*jobs, {"submission_id": "no-engines", "status": "RUNNING", "driver_node_id": "n"}]}
    pages |= {
        f"/api/v0/logs/file?node_id=n&filename=engines-{name}.json&lines=1": {"run": "demo", "engines": rows} for name in ("now", "old")
    }
    with served() as answers:
        answers.pages = pages
        found = Serving.of(stack(), [ElasticNode("rollout", "ray-rollout-0", "running", 3.0)], Dashboard(answers.url, None))
    assert found.lines() == [
        "elastic rollout  ray-rollout-0  running  3.00 USD/h",
        "engine rollout-0  of the cluster  run demo  weights 12  1,234 tokens/s  8 in flight",
        "engine elastic-3  on 10.0.0.7  run demo  weights 11  80 tokens/s  2 in flight  1.50 USD/h",
        "engine e  on 10.0.0.7  run demo  weights 11  80 tokens/s  2 in flight  1.50 USD/h",
    ]
    assert found.as_json()["engines"][1] == first | {"run": "demo", "price": 1.5}
    assert found.as_json()["elastic"] == [{"fleet": "rollout", "name": "ray-rollout-0", "state": "running", "price": 3.0}]
