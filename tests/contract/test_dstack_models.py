"""Every file that a stack renders, read by dstack's own parser and compared with the reviewed text in golden/."""

from __future__ import annotations

import difflib
import io
import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from cluster_tasks.ray import node_agent
from stacks.dstack_api import FleetConfiguration, TaskConfiguration, create_file_archive, parse_apply_configuration
from stacks.load import load, names
from stacks.places import machine, place_of

ROOT = Path(__file__).parents[2]
SUBJECT = {"type": "JWT", "alg": "RS256", "private-key": "key", "kid": "key-1", "iss": "account-1", "sub": "account-1"}
NEBIUS = json.dumps({"subject-credentials": SUBJECT})  # a file of its credentials, as its console gives it
GOLDEN = Path(__file__).parent / "golden"
Files = Callable[[str], dict[str, str]]
ON_DSTACK = [name for name in names(ROOT) if load(name, ROOT).cloud != "slurm"]
LEAVE_THIS_MACHINE = [name for name in ON_DSTACK if load(name, ROOT).cloud != "local"]


def of_kind(texts: dict[str, str], ending: str) -> list[dict]:
    return [yaml.safe_load(text) for name, text in texts.items() if name.endswith(ending)]


@pytest.mark.parametrize("stack_name", names(ROOT))
def test_the_rendered_files_are_the_reviewed_ones(stack_name: str, files: Files) -> None:
    folder, got = GOLDEN / stack_name, files(stack_name)
    if os.environ.get("UPDATE_GOLDEN"):
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
        for name, text in got.items():
            (folder / name).write_text(text)
    reviewed = {file.name: file.read_text() for file in folder.iterdir()} if folder.is_dir() else {}
    changes = [
        line
        for name in sorted(got.keys() | reviewed.keys())
        for line in difflib.unified_diff(
            reviewed.get(name, "").splitlines(), got.get(name, "").splitlines(), f"golden/{stack_name}/{name}", "rendered", lineterm=""
        )
    ]
    assert not changes, "\n".join([*changes, "Is this meant? Then accept it: UPDATE_GOLDEN=1 pytest tests/contract/test_dstack_models.py"])


@pytest.mark.parametrize("stack_name", ON_DSTACK)
def test_dstack_reads_the_task_as_it_is_meant(stack_name: str, files: Files) -> None:
    stack, [task] = load(stack_name, ROOT), of_kind(files(stack_name), "ray-cluster.dstack.yml")
    parsed = parse_apply_configuration(task)
    assert isinstance(parsed, TaskConfiguration)
    assert parsed.nodes_num == stack.fleets[0].nodes
    assert [(port.local_port, port.container_port) for port in parsed.ports] == [(stack.task.dashboard_port, 8265)]
    # By a volume, or by a command of a container that may.
    mounted = [volume.path for volume in parsed.volumes] or (
        parsed.privileged and ["/checkpoints" for line in task["commands"] if "/checkpoints" in line]
    )
    assert mounted and set(mounted) == {"/checkpoints"}
    gpu, fleet = parsed.resources.gpu, stack.fleets[0]
    wanted = machine(stack.cloud, fleet.machine).gpus if fleet.machine else fleet.gpu.count if fleet.gpu else 0
    assert (gpu.count.min if gpu else 0) == wanted
    assert (parsed.stop_criteria or "").value == "master-done"  # type: ignore[union-attr]


@pytest.mark.parametrize("stack_name", ON_DSTACK)
def test_the_commands_are_shell_without_a_syntax_error(stack_name: str, files: Files) -> None:
    [task] = of_kind(files(stack_name), "ray-cluster.dstack.yml")
    line = " && ".join(task["commands"])  # as dstack joins them
    done = subprocess.run([task["shell"], "-n", "-c", line], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("stack_name", ON_DSTACK)
def test_every_file_that_the_task_carries_exists_beside_it_or_in_the_repository(stack_name: str, files: Files) -> None:
    [task] = of_kind(files(stack_name), "ray-cluster.dstack.yml")
    for mapping in parse_apply_configuration(task).files:  # type: ignore[union-attr]
        local = mapping.local_path
        assert local == "node" or (ROOT / "build" / stack_name / local).resolve().is_relative_to(ROOT / "requirements"), local
        if local != "node":
            assert (ROOT / "requirements" / Path(local).name).is_file()


def test_dstack_uploads_all_of_the_node_agent_although_git_ignores_where_it_is_published(tmp_path: Path) -> None:
    shutil.copy(ROOT / ".gitignore", tmp_path)
    folder = tmp_path / "build/any/node"
    for path, text in node_agent().items():
        (folder.parent / path).parent.mkdir(parents=True, exist_ok=True)
        (folder.parent / path).write_text(text)
    with io.BytesIO() as archive:
        create_file_archive(folder, archive)
        archive.seek(0)
        with tarfile.open(fileobj=archive) as tar:
            assert {member.name for member in tar if member.isfile()} == node_agent().keys()


@pytest.mark.parametrize("stack_name", LEAVE_THIS_MACHINE)
def test_dstack_reads_the_fleets_as_they_are_meant(stack_name: str, files: Files) -> None:
    stack = load(stack_name, ROOT)
    fleets = stack.fleets
    parsed = [parse_apply_configuration(definition) for definition in of_kind(files(stack_name), ".fleet.dstack.yml")]
    for fleet, definition in zip(fleets, parsed, strict=True):
        assert isinstance(definition, FleetConfiguration)
        assert definition.name == fleet.name
        anywhere = place_of(stack).launches and fleet.nodes == 1
        assert definition.placement is not None and definition.placement.value == ("any" if anywhere else "cluster")
        if fleet.ssh:
            assert definition.ssh_config is not None
            hosts = [host if isinstance(host, str) else host.hostname for host in definition.ssh_config.hosts]
            assert hosts == [host.hostname for host in fleet.ssh.hosts]


@pytest.mark.parametrize("stack_name", LEAVE_THIS_MACHINE)
def test_dstack_reads_its_server_configuration(stack_name: str, files: Files, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for entry in load(stack_name, ROOT).backends:
        if file := entry.known.default_file:  # what it names in the home of who starts the server
            Path(file).expanduser().parent.mkdir(parents=True)
            Path(file).expanduser().write_text(NEBIUS)
    config = pytest.importorskip("dstack._internal.server.services.config", reason="needs the extra dstack[server]", exc_type=ImportError)
    [definition] = of_kind(files(stack_name), "server-config.yml")
    dstack = load(stack_name, ROOT).dstack
    assert [project.name for project in config.ServerConfig.model_validate(definition).projects] == [dstack.project if dstack else "main"]


@pytest.mark.parametrize("stack_name", names(ROOT))
def test_the_runtime_environment_is_one_that_ray_takes(stack_name: str, files: Files) -> None:
    from ray.runtime_env import RuntimeEnv

    [environment] = of_kind(files(stack_name), "runtime-env.yaml")
    RuntimeEnv(**environment)


def test_a_golden_file_belongs_to_a_stack_that_exists() -> None:
    assert {folder.name for folder in GOLDEN.iterdir()} == set(names(ROOT))
