"""A job's task, and a cluster over unlike fleets: read by dstack's own parser."""

from __future__ import annotations

import io
import json
import shlex
import tarfile
from pathlib import Path
from typing import Any

import pytest

from cluster_tasks.node.checks import where_checkpoints_are
from cluster_tasks.node.dashboard import missing
from cluster_tasks.node.settings import Settings, _parser, read_settings
from cluster_tasks.ray import APART, brought_from_project, ray_cluster, ray_job
from fleets.fleet import fleet
from infra.publish import rendered
from infra.ssh import build as ssh
from stacks.dstack_api import FleetConfiguration, TaskConfiguration, create_file_archive, parse_apply_configuration
from stacks.load import StackError, parse
from stacks.schema import Stack, Task

SSH = {"user": "ubuntu", "identity_file": "~/.ssh/key", "network": "10.0.0.0/24"}
FLEETS = [
    {"name": "cpu", "cpus": 16, "ssh": SSH | {"hosts": [{"hostname": "head"}]}},
    {"name": "small", "gpu": {"name": "L4", "count": 2}, "resources": {"small": 2}, "ssh": SSH | {"hosts": [{"hostname": "s1"}]}},
    {
        "name": "large",
        "gpu": {"name": "H100", "count": 8},
        "ssh": SSH | {"user": "root", "hosts": [{"hostname": "l1"}, {"hostname": "l2", "user": "me"}]},
    },
]
JOB = {"command": "python -m trainer.train_ppo --config run.yaml", "files": ["trainer", "run.yaml"]}


def stack(**task: Any) -> Stack:
    return parse("lab", {"flotilla:cloud": "ssh", "flotilla:fleets": FLEETS, "flotilla:task": {"image": "me/ray:1"} | task})


def read(task: dict[str, Any]) -> TaskConfiguration:
    parsed = parse_apply_configuration(task)
    assert isinstance(parsed, TaskConfiguration)
    return parsed


def agent(command: str) -> Settings:
    """The command's flags as the agent reads them, in sh's words."""
    words = shlex.split(command)
    assert words[:3] == ["exec", "python3", "node"]
    return read_settings(words[3:], {"DSTACK_NODE_RANK": "0", "DSTACK_NODES_IPS": "10.0.0.1\n10.0.0.2\n10.0.0.3\n10.0.0.4"})


def test_the_first_fleet_alone_is_the_cluster_unless_others_are_named() -> None:
    given = stack()
    assert read(ray_cluster(given, ssh.build(given))).groups is None
    fleets = [name for name in rendered(given, ssh.build(given)) if "fleet" in name]
    assert fleets == [f"{name}.fleet.dstack.yml" for name in ("cpu", "small", "large")]


def test_named_fleets_are_groups_whose_head_takes_no_gpu_node() -> None:
    several = stack(fleets=["cpu", "small", "large"])
    task = read(ray_cluster(several, ssh.build(several)))
    assert task.groups is not None
    assert [(group.name, group.nodes) for group in task.groups] == [("cpu", 1), ("small", 1), ("large", 2)]
    gpus = [group.resources.gpu for group in task.groups]
    assert [(gpu.name, gpu.count.min) for gpu in gpus if gpu] == [(None, 0), (["L4"], 2), (["H100"], 8)]
    assert gpus[0] is not None
    assert gpus[0].count.max == 0
    assert [len(group.ports) for group in task.groups] == [1, 0, 0]
    assert task.fleets is not None
    assert len(task.fleets) == 1
    head, small, _ = (agent(group.commands[-1]) for group in task.groups)
    assert head.node_gpus == [0, 2, 8, 8]
    assert small.resources == '{"small": 2.0}'


@pytest.mark.parametrize("where", [None, 0, 2])
def test_a_cluster_with_pools_of_sandboxes_has_privileged_containers_and_no_other_has(where: int | None) -> None:
    given = [fleet | ({"sandboxes": {"number": 4}} if number == where else {}) for number, fleet in enumerate(FLEETS)]
    task = {"image": "me/ray:1", "fleets": ["cpu", "large"]}
    read_stack = parse("lab", {"flotilla:cloud": "ssh", "flotilla:fleets": given, "flotilla:task": task})
    made = ray_cluster(read_stack, ssh.build(read_stack))
    assert (made.get("privileged"), read(made).privileged) == ((None, False) if where is None else (True, True))


def test_the_fleets_of_a_cluster_are_one_to_dstack() -> None:
    several = stack(fleets=["cpu", "small", "large"])
    site = ssh.build(several)
    assert [name for name in rendered(several, site) if "fleet" in name] == ["cpu.fleet.dstack.yml"]
    [joined] = several.dstack_fleets()
    parsed = parse_apply_configuration(fleet(several, site, joined))
    assert isinstance(parsed, FleetConfiguration)
    assert parsed.ssh_config is not None
    hosts = [host if isinstance(host, str) else (host.hostname, host.user) for host in parsed.ssh_config.hosts]
    assert hosts == ["head", "s1", ("l1", "root"), ("l2", "me")]


def test_the_head_waits_for_each_nodes_own_gpus() -> None:
    alive = {"a": {}, "b": {"GPU": 2.0}, "c": {"GPU": 6.0}}
    assert missing(["a", "b", "c"], [0, 2, 8], alive) == ["c with 6 of 8 GPUs"]
    assert missing(["a", "b"], [0, 2], alive) == []


def test_a_job_brings_its_files_and_ends_the_run_with_its_code() -> None:
    given = stack(job=JOB)
    assert given.task.job is not None
    task = read(ray_job(given, ssh.build(given), given.task.job))
    settings = agent(task.commands[-1])
    assert (settings.job, settings.working_dir, settings.runtime_env) == (JOB["command"], "project", "runtime-env.yaml")
    brought = {file.path: file.local_path for file in task.files}
    assert brought["project/run.yaml"] == "../../run.yaml"
    assert task.name == "ray-job"
    assert "ray-job.dstack.yml" in rendered(given, ssh.build(given))


@pytest.mark.parametrize(("retry", "events"), [(False, ["no-capacity", "interruption"]), (True, ["no-capacity", "interruption", "error"])])
def test_a_job_that_fails_by_itself_is_repeated_only_where_that_is_asked_for(retry: bool, events: list[str]) -> None:
    given = stack(job=JOB | {"retry": retry, "schedule": "0 3 * * *"})
    assert given.task.job is not None
    task = read(ray_job(given, ssh.build(given), given.task.job))
    assert not isinstance(task.retry, bool)
    assert task.retry is not None
    assert [event.value for event in task.retry.on_events or []] == events
    assert task.schedule is not None
    assert task.schedule.crons == ["0 3 * * *"]


def test_what_ends_an_idle_run_is_as_dstack_reads_it() -> None:
    given = stack(utilization={"min_gpu": 10, "window": "1h"}, stop_duration="10m")
    task = read(ray_cluster(given, ssh.build(given)))
    assert task.utilization_policy is not None
    assert (task.utilization_policy.min_gpu_utilization, task.utilization_policy.time_window) == (10, 3600)
    assert task.stop_duration == 600


@pytest.mark.parametrize(
    ("task", "error"),
    [
        ({"fleets": ["cpu", "big"]}, r"flotilla:task\.fleets\[1\]: 'big' is not a fleet of this stack \(allowed: cpu, small, large\)"),
        ({"fleets": ["cpu", "cpu"]}, r"flotilla:task\.fleets\[1\]: 'cpu' is listed twice"),
        (
            {"job": {"command": "x", "files": ["../run.yaml"]}},
            r"flotilla:task\.job\.files\[0\]: '../run.yaml' is not a path in the project",
        ),
        ({"job": {"command": "x", "schedule": "daily"}}, r"flotilla:task\.job\.schedule: 'daily' is not five fields of cron"),
        ({"utilization": {"min_gpu": 101}}, r"flotilla:task\.utilization\.min_gpu: 101 is not an integer between 1 and 100"),
        (
            {"utilization": {"min_gpu": 10, "window": "3h"}},
            r"flotilla:task\.utilization\.window: '3h' is not a duration from 5m to 1h, for which dstack's server keeps metrics",
        ),
        ({"volumes": ["data"]}, r"flotilla:task\.volumes\[0\]: 'data' is not a mount such as"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_setting(task: dict[str, Any], error: str) -> None:
    with pytest.raises(StackError, match=rf"^stacks/Pulumi\.lab\.yaml: {error}[^\n]*$"):
        stack(**task)


def test_a_cloud_launches_the_machines_of_one_fleet_for_a_cluster() -> None:
    fleets = [{"name": name, "nodes": 1, "machine": "g6.12xlarge"} for name in ("aa", "bb")]
    settings = {
        "flotilla:cloud": "aws",
        "flotilla:region": "us-east-1",
        "flotilla:fleets": fleets,
        "flotilla:task": {"fleets": ["aa", "bb"]},
    }
    with pytest.raises(StackError, match=r"flotilla:task\.fleets\[0\]: 'aa' makes a cluster of several fleets"):
        parse("cloud", settings)


def test_earlier_checkpoints_are_said_to_be_elsewhere() -> None:
    a, b = "10.0.0.1", "10.0.0.2"
    assert "does not find them" in where_checkpoints_are(a, a, None)[0], "a first run is told what the volume cannot promise"
    assert where_checkpoints_are(a, a, a) == []
    assert f"are on {b}, but now the head is {a}" in where_checkpoints_are(a, a, b)[0], "the head knows from its note as a worker"
    assert f"are on {b}, but now the head is {a}" in where_checkpoints_are(b, a, b)[0], "the old head says it too"
    assert where_checkpoints_are("10.0.0.3", a, b) == []


def test_what_a_stack_leaves_out_is_the_agents_own_default():
    """Flags with the default of the stack's type are not rendered, so that of the agent's flag has to be the same."""
    agent, task = _parser(), Task()
    for name in ("dashboard_port", "join_timeout", "on_node_loss"):
        assert getattr(task, name) == agent.get_default(name), name


def test_the_runs_priority_is_dstacks_and_the_queues_rules_are_the_agents() -> None:
    assert read(ray_cluster(stack(priority=70), ssh.build(stack()))).priority == 70
    assert not agent(ray_cluster(stack(), ssh.build(stack()))["commands"][-1]).queue
    given = {"flotilla:cloud": "ssh", "flotilla:fleets": FLEETS, "flotilla:task": {"image": "me/ray:1"}}
    ours = parse("lab", given | {"flotilla:queue": {"min_run": "1m", "owners": {"ann": {"weight": 2}}}})
    told = agent(ray_cluster(ours, ssh.build(ours))["commands"][-1]).queue
    assert json.loads(told) == {"min_run": 60, "owners": {"ann": {"weight": 2, "quota": None}}}


@pytest.mark.parametrize("path", ["trainer", *APART])
def test_what_jobs_bring_of_the_trainer_is_small_enough_for_a_server_that_nobody_configured(path) -> None:
    archive = io.BytesIO()
    create_file_archive(Path(__file__).parents[3] / path, archive)
    assert 2**17 < archive.tell() < 2**21 - 2**15


def test_a_job_brings_all_of_the_trainer_but_what_reads_scripts_of_others() -> None:
    root = Path(__file__).parents[3]
    brought: set[str] = set()
    for line in brought_from_project(["trainer"]):
        path = root / line.partition(":")[0].removeprefix("../../")
        create_file_archive(path, archive := io.BytesIO())
        with tarfile.open(fileobj=io.BytesIO(archive.getvalue())) as found:
            brought |= {str((path.parent / name).relative_to(root)) for name in found.getnames()}
    mine = {str(file.relative_to(root)) for file in (root / "trainer").rglob("*.py")}
    assert {name for name in mine - brought if not name.startswith("trainer/cli/convert/")} == set()
