"""What launch checks before it makes anything. With a dstack server it is tested in tests/integration/dstack/test_launch.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cli.launch import main as on_command_line
from cluster_tasks.client import cluster, launch
from cluster_tasks.client.dstack_run import ROOT, ClusterError
from cluster_tasks.client.submit import Job
from stacks.schema import Stack

FLEET = {"name": "laptop", "nodes": 1}


def stack(**task: Any) -> Stack:
    return Stack.model_validate({"name": "lab", "cloud": "local", "fleets": [FLEET], "task": task})


def test_a_stack_without_its_files_names_the_command_that_makes_them(tmp_path: Path) -> None:
    (tmp_path / "ray.token").touch()
    with pytest.raises(ClusterError, match=r"ray-cluster.dstack.yml is missing; first: pulumi up --stack lab, or .* flotilla preview lab"):
        cluster.environment(stack(), tmp_path, "http://localhost:8265")


def test_the_environment_of_its_commands_is_that_of_env_sh(tmp_path: Path) -> None:
    for name, text in (("ray.token", "secret\n"), ("ray-cluster.dstack.yml", "")):
        (tmp_path / name).write_text(text)
    env = cluster.environment(stack(), tmp_path, "http://localhost:1")
    assert (env["RAY_AUTH_TOKEN"], env["RAY_AUTH_MODE"], env["RAY_ADDRESS"]) == ("secret", "token", "http://localhost:1")
    assert env["FLOTILLA_STACK"] == tmp_path.name


@pytest.mark.parametrize(
    ("flags", "working_dir", "runtime_env"),
    [
        ([], "{root}", "{root}/build/onprem/runtime-env.yaml"),
        (["--working-dir", "job"], "{here}/job", "{root}/build/onprem/runtime-env.yaml"),
        (["--working-dir=."], "{here}", "{root}/build/onprem/runtime-env.yaml"),
        (["--working-dir", "s3://b/x.zip", "--runtime-env", "env.yaml"], "s3://b/x.zip", "{here}/env.yaml"),
    ],
)
def test_paths_are_seen_from_the_folder_in_which_launch_is_typed(
    flags: list[str], working_dir: str, runtime_env: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[Job] = []
    monkeypatch.setattr(launch, "launch", lambda stack, job, *_: jobs.append(job) or 0)
    monkeypatch.chdir(tmp_path)
    assert on_command_line("launch", ["onprem", *flags, "--", "true"], ROOT) == 0
    [job] = jobs
    places = {"root": ROOT, "here": tmp_path}
    assert (str(job.working_dir), str(job.runtime_env)) == (working_dir.format(**places), runtime_env.format(**places))
