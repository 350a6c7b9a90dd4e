"""One screen about a stack: what counts as not healthy, and what is shown. dstack's and Ray's APIs are real HTTP with made-up answers."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from support.dstack_answers import Answers, fleet, host, job, run, served

from cluster_tasks.client import status
from cluster_tasks.client.dstack_run import DstackRun
from cluster_tasks.client.jobs import Progress
from cluster_tasks.client.status import Status
from cluster_tasks.identity import WrongCluster
from cluster_tasks.node.dashboard import Dashboard
from stacks.schema import Stack

NOW = datetime(2026, 1, 1, 2, tzinfo=UTC)  # two hours after everything in dstack_answers
NODES, STARTED = "/api/v0/nodes?limit=10000", int(datetime(2026, 1, 1, 1, tzinfo=UTC).timestamp() * 1000)
HOSTS = [{"hostname": "10.0.0.1"}, {"hostname": "10.0.0.2"}]
MACHINE = {"name": "g6.8xlarge", "resources": {"cpus": 32, "memory_mib": 131072, "gpus": [], "spot": False}}


def stack(*fleets: str, **task: Any) -> Stack:
    ssh = {"user": "ubuntu", "identity_file": "~/.ssh/flotilla", "hosts": HOSTS}
    values = {"name": "lab", "cloud": "ssh", "fleets": [{"name": name, "ssh": ssh} for name in fleets]}
    return Stack.model_validate(values | {"task": task, "checkpoints": {"kind": "shared", "path": "/mnt"}})


def nodes(alive: int, dead: int = 0) -> dict[str, Any]:
    listed = [{"node_ip": f"10.0.0.{n}", "resources_total": {}, "state": "ALIVE" if n < alive else "DEAD"} for n in range(alive + dead)]
    return {"data": {"result": {"result": listed}}}


@pytest.fixture
def server() -> Iterator[Answers]:
    """A healthy cluster of two nodes, whose dashboard is forwarded."""
    with served() as answers:
        answers.run, answers.fleets = run(job(0), job(1), cost=1.5), [fleet(host(1, "busy"), host(2, "busy"))]
        answers.pages = {NODES: nodes(2), "/api/jobs/": [], "/nodes?view=summary": {"data": {"summary": []}}}
        yield answers


def asked(server: Answers, folder: Path, dashboard: Dashboard | None = None) -> DstackRun:
    return DstackRun(server.client, "ray", folder, {}, dashboard or Dashboard(server.url, "token"), 8265, "gpus")


def look(server: Answers, folder: Path, wanted: Stack | None = None) -> Status:
    return status.find(wanted or stack("gpus"), asked(server, folder), NOW)


def test_a_cluster_that_runs_on_all_its_machines_is_healthy(server: Answers, tmp_path: Path):
    found = look(server, tmp_path)
    assert (found.trouble, found.run, found.nodes, found.ray_nodes) == ([], "running", ["running", "running"], 2)
    assert [(machine.name, machine.status, machine.hours) for machine in found.machines] == [
        ("gpus-1", "busy", 2.0),
        ("gpus-2", "busy", 2.0),
    ]


def test_machines_cost_by_the_hour_and_those_that_ended_nothing(server: Answers, tmp_path: Path):
    known = {"instance_type": MACHINE, "region": "us-east-1", "price": 2.5}
    server.fleets = [fleet(host(1, "busy", **known), host(2, "terminated", **known))]
    found = look(server, tmp_path)
    assert (found.cost, found.run_cost) == (5.0, 1.5)
    assert [(machine.kind, machine.region) for machine in found.machines] == [("g6.8xlarge", "us-east-1")]


def test_machines_that_do_not_answer_or_fail_their_health_check_are_named(server: Answers, tmp_path: Path):
    sick, ending = host(2, "busy", health_status="failure"), host(3, "terminating", termination_reason="error")
    server.fleets = [fleet(host(1, "busy", unreachable=True), sick, ending)]
    assert look(server, tmp_path).trouble == [
        "machine gpus-1: does not answer",
        "machine gpus-2: its GPUs fail dstack's health check",
        "machine gpus-3: error",
    ]


def test_a_fleet_that_the_server_does_not_have_is_named_and_strangers_fleets_are_not_shown(server: Answers, tmp_path: Path):
    server.fleets = [fleet(host(1), name="others")]
    found = look(server, tmp_path)
    assert (found.machines, found.trouble) == ([], ["no fleet gpus"])


def test_fleets_of_one_cluster_are_one_to_dstack(server: Answers, tmp_path: Path):
    assert look(server, tmp_path, stack("gpus", "more", fleets=["gpus", "more"])).trouble == []


@pytest.mark.parametrize(
    ("found", "trouble"),
    [
        (None, "the run ray is not there"),
        (run(job(0, "failed"), status="failed"), "the run ray is failed"),
        (run(job(0), job(1, "pulling"), status="provisioning"), "node 1 is pulling"),
    ],
)
def test_a_run_that_does_not_run_on_every_node_is_not_healthy(found: Any, trouble: str, server: Answers, tmp_path: Path):
    server.run = found
    assert look(server, tmp_path).trouble == [trouble]


def test_a_node_that_ray_has_lost_is_noticed_though_its_container_runs(server: Answers, tmp_path: Path):
    server.pages[NODES] = nodes(1, dead=1)
    assert look(server, tmp_path).trouble == ["Ray has 1 of 2 nodes"]


def test_a_dashboard_that_is_not_forwarded_is_no_trouble_but_another_cluster_there_is(server: Answers, tmp_path: Path):
    server.pages = {}
    found = look(server, tmp_path)
    assert (found.ray_nodes, found.jobs, found.trouble) == (None, [], [])

    class Stranger(Dashboard):
        def verify(self, connection: Any) -> None:
            raise WrongCluster("it is the cluster of somebody else")

    found = status.find(stack("gpus"), asked(server, tmp_path, Stranger(server.url, "token")), NOW)
    assert (found.ray_nodes, found.trouble) == (None, ["it is the cluster of somebody else"])


def test_jobs_are_shown_with_what_the_trainer_said_last(server: Answers, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    server.pages["/api/jobs/"] = [
        {
            "submission_id": "new",
            "status": "RUNNING",
            "entrypoint": "python -m trainer.train_ppo",
            "start_time": STARTED,
            "driver_node_id": "n",
        },
        {"submission_id": "old", "status": "FAILED", "entrypoint": "false", "start_time": STARTED - 1_800_000},
        {"submission_id": None, "status": "RUNNING", "entrypoint": "a driver that nobody submitted", "start_time": STARTED},
    ]
    said = {"run": "a", "step": 2, "steps": 60, "checkpoint": "/runs/a/checkpoints/step_1", "reward": 0.6}
    server.pages["/api/v0/logs/file?node_id=n&filename=progress-new.json&lines=1"] = said
    found = look(server, tmp_path)
    assert [(job.name, job.status, job.hours, job.progress) for job in found.jobs] == [
        ("old", "FAILED", 1.5, None),
        ("new", "RUNNING", 1.0, Progress(**said)),
    ]
    status.show(found, asked(server, tmp_path))
    lines = capsys.readouterr().out.splitlines()
    assert "run ray: running: nodes running, running" in lines
    assert lines[lines.index("job new  RUNNING  1.0 h  python -m trainer.train_ppo") + 1 :][:2] == [
        "    step 2/60  reward 0.6",
        "    checkpoint /runs/a/checkpoints/step_1",
    ]


def test_elastic_nodes_are_shown_to_people_and_programs(server: Answers, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    one, other = ({"ssh": {"user": "me", "identity_file": "~/key", "hosts": [host]}} for host in HOSTS)
    fleets = [one | {"name": "gpus"}, other | {"name": "spot", "role": "rollout"}]
    checkpoints = {"kind": "shared", "path": "/mnt"}
    wanted = Stack.model_validate({"name": "lab", "cloud": "ssh", "checkpoints": checkpoints, "fleets": fleets})
    found = look(server, tmp_path, wanted)
    status.show(found, asked(server, tmp_path))
    assert "elastic spot  ray-spot-0  running\n" in capsys.readouterr().out
    assert status.status_json(found)["elastic"] == [{"fleet": "spot", "name": "ray-spot-0", "state": "running", "price": None}]
    assert status.status_json(found)["engines"] == []


def test_what_is_wrong_is_on_the_screen(server: Answers, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    server.run, server.fleets, server.pages = None, [], {}
    status.show(look(server, tmp_path), asked(server, tmp_path))
    out = capsys.readouterr().out
    assert "no machines\nrun ray: not there\nRay: not forwarded to this machine; dstack attach ray\n" in out
    assert out.endswith("not healthy: no fleet gpus\nnot healthy: the run ray is not there\n")


def test_a_stack_that_dstack_does_not_drive_cannot_be_asked(capsys: pytest.CaptureFixture[str]):
    assert status.main(["nowhere"]) == 2 and "there is no stack 'nowhere'" in capsys.readouterr().err
    assert status.main(["local"]) == 2 and "needs no dstack" in capsys.readouterr().err
