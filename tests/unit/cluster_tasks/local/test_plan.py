"""A dstack task as processes of this machine."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster_tasks.local.elastic import processes
from cluster_tasks.local.plan import (
    LocalError,
    Ports,
    dashboard_port,
    make_plan,
    named_port,
    node_gpus,
    place_files,
    ray_folder,
    read_task,
    task_environment,
    volume_folders,
)
from cluster_tasks.node.own_folder import BELOW, SOCKET
from cluster_tasks.ray import RANGE, ROLLOUT
from stacks.dstack_api import TaskConfiguration, parse_apply_configuration

TASK: dict[str, Any] = {
    "type": "task",
    "name": "ray",
    "nodes": 2,
    "shell": "bash",
    "commands": ["a || b", "exec c"],
    "files": ["node", "../shared.txt:given/copy.txt"],
    "env": ["FLOTILLA_RUNS=/checkpoints", "CACHE=/checkpoints/cache", "OTHER=/checkpoints-of-others", "TOKEN"],
    "volumes": ["/var/lib/x:/checkpoints"],
    "ports": [8265],
}
SHELL = {"TOKEN": "secret", "PATH": "/bin", "HOME": "/home/me", "RAY_ADDRESS": "http://elsewhere", "SLURM_JOB_ID": "1"}


def task(**changes: object) -> TaskConfiguration:
    parsed = parse_apply_configuration(TASK | changes)
    assert isinstance(parsed, TaskConfiguration)
    return parsed


def test_paths_on_a_volume_are_rewritten_and_others_are_not(tmp_path: Path) -> None:
    env = task_environment(task(), tmp_path, SHELL)
    folder = tmp_path / "volumes/checkpoints"
    assert volume_folders(task(), tmp_path) == {"/checkpoints": folder}
    assert env == {
        "FLOTILLA_RUNS": str(folder),
        "CACHE": f"{folder}/cache",
        "OTHER": "/checkpoints-of-others",
        "TOKEN": "secret",
    }


def test_a_bare_name_that_the_shell_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="takes TOKEN from your shell"):
        task_environment(task(), tmp_path, {})


def test_each_node_is_told_as_dstack_tells_it(tmp_path: Path) -> None:
    plan = make_plan(task(), tmp_path, Ports(dashboard=8300, gcs=7000), SHELL)
    head, worker = plan.nodes
    assert worker.env["DSTACK_NODES_IPS"] == "127.0.0.2\n127.0.0.3"
    assert (worker.env["DSTACK_NODE_RANK"], worker.env["DSTACK_NODES_NUM"], worker.env["DSTACK_MASTER_NODE_IP"]) == ("1", "2", "127.0.0.2")
    assert head.command == ["bash", "-c", "a || b && exec c"]
    assert head.env["PATH"].split(":")[0] == str(Path(sys.executable).parent)
    assert head.env["HOME"] == "/home/me"
    flags = shlex.split(head.env["FLOTILLA_NODE_ARGS"])
    assert {"--dashboard-port=8300", "--port=7000"} <= set(flags)


def test_another_clusters_address_and_token_do_not_reach_the_nodes(tmp_path: Path) -> None:
    (tmp_path / "ray.token").write_text("ours\n")
    other = SHELL | {
        "RAY_AUTH_TOKEN": "theirs",
        "RAY_AUTH_TOKEN_PATH": "/theirs",
        "FLOTILLA_TOKEN_LAB": "theirs",
        "FLOTILLA_TOKEN_X": "theirs",
    }
    rendered = task(env=["RAY_AUTH_MODE=token", "FLOTILLA_TOKEN_LAB", *TASK["env"]])
    for node in make_plan(rendered, tmp_path, Ports(8300, 7000), other).nodes:
        assert not {"RAY_ADDRESS", "SLURM_JOB_ID", "RAY_AUTH_TOKEN_PATH"} & node.env.keys()
        assert (node.env["RAY_AUTH_MODE"], node.env["RAY_AUTH_TOKEN"]) == ("token", "ours")
        assert node.env["FLOTILLA_TOKEN_LAB"] == "ours" and "theirs" not in node.env.values()


def test_a_cluster_has_a_token_of_its_own_whatever_its_task_says(tmp_path: Path) -> None:
    node = make_plan(task(), tmp_path, Ports(8300, 7000), SHELL).nodes[0]
    assert node.env["RAY_AUTH_TOKEN"] == (tmp_path / "ray.token").read_text()
    assert (tmp_path / "ray.token").stat().st_mode & 0o777 == 0o600
    assert node.env["RAY_AUTH_MODE"] == "token"


def test_every_node_has_its_own_share_of_the_gpus(tmp_path: Path) -> None:
    nodes = make_plan(task(resources={"gpu": 2}), tmp_path, Ports(8300, 7000), SHELL).nodes
    assert [node.env["CUDA_VISIBLE_DEVICES"] for node in nodes] == ["0,1", "2,3"]
    assert nodes[0].env["DSTACK_GPUS_NUM"] == "4"


GROUPS = [
    {"name": "large", "nodes": 1, "commands": ["exec head"], "resources": {"gpu": 2}, "ports": ["8300:8265"]},
    {"name": "small", "nodes": 2, "commands": ["exec worker"], "resources": {"gpu": 1}},
]


def test_groups_of_nodes_have_commands_and_gpus_of_their_own(tmp_path: Path) -> None:
    grouped = {key: value for key, value in TASK.items() if key not in ("nodes", "commands", "ports")} | {"groups": GROUPS}
    parsed = parse_apply_configuration(grouped)
    assert isinstance(parsed, TaskConfiguration)
    nodes = make_plan(parsed, tmp_path, Ports(8300, 7000), SHELL).nodes
    assert [node.command[-1] for node in nodes] == ["exec head", "exec worker", "exec worker"]
    assert [node.env["CUDA_VISIBLE_DEVICES"] for node in nodes] == ["0,1", "2", "3"]
    assert [node.env["DSTACK_GPUS_PER_NODE"] for node in nodes] == ["2", "1", "1"]
    assert {node.env["DSTACK_GPUS_NUM"] for node in nodes} == {"4"}
    assert node_gpus(parsed) == [2, 1, 1]
    assert named_port(parsed) == 8300


def test_rays_sockets_fit_into_the_kernels_limit_however_deep_the_folder_is(tmp_path: Path) -> None:
    session = "session_2026-11-21_11-38-14_071032_4194304/sockets/plasma_store"
    assert len(f"{ray_folder(tmp_path / ('deep/' * 40))}/100/{session}") <= 107
    assert ray_folder(tmp_path / "a") != ray_folder(tmp_path / "b")


def test_files_and_the_folder_of_runs_are_where_the_task_and_a_person_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "secret")
    root = tmp_path / "local"
    root.mkdir()
    (root / "node").mkdir()
    (root / "node/__main__.py").write_text("agent")
    (tmp_path / "shared.txt").write_text("shared")
    place_files(task(), root)
    assert (root / "nodes/1/node/__main__.py").read_text() == "agent"
    assert (root / "nodes/1/given/copy.txt").read_text() == "shared"
    (root / "volumes/checkpoints/demo").mkdir()
    assert (root / "runs/demo").is_dir()
    place_files(task(), root)  # again, over what is there
    assert (root / "runs/demo").is_dir()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "does not exist"),
        ("type: [", "is not a dstack task"),
        (yaml.safe_dump(TASK | {"node": 2}), "node"),
        (yaml.safe_dump(TASK | {"commands": ["ping ${{ groups[0].nodes[0].IP_ADDRESS }}"]}), "which dstack's server fills in"),
        (yaml.safe_dump({"type": "fleet", "name": "f", "nodes": 1}), "only a task runs here"),
    ],
)
def test_a_file_that_is_no_task_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "task.yml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(LocalError, match=message):
        read_task(file)


def test_a_file_that_the_task_names_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "secret")
    with pytest.raises(LocalError, match=r"file node does not exist"):
        place_files(task(), tmp_path)


@pytest.mark.parametrize("port", ["eight", "0", "65536"])
def test_a_port_that_is_none_is_refused(port: str) -> None:
    with pytest.raises(LocalError, match=f"--port {port} is not a port"):
        dashboard_port(task(), port)


def test_no_name_of_an_elastic_fleet_is_too_long_for_rays_sockets(tmp_path: Path) -> None:
    name = "a" * 41  # stacks/settings/fields.py
    node = TASK | {"nodes": 1, "files": [], "env": [f"{RANGE}=0..2"], "volumes": []}
    (tmp_path / f"{name}{ROLLOUT}").write_text(yaml.safe_dump(node))
    nodes = processes(tmp_path, task(), SHELL)
    folders = [word.partition("=")[2] for each in nodes for word in shlex.split(each.env["FLOTILLA_NODE_ARGS"]) if "--temp-dir" in word]
    assert len({*folders}) == 2 and all(len(folder) + BELOW <= SOCKET for folder in folders)
