"""What launch checks before it makes anything. With a dstack server it is tested in tests/integration/dstack/test_launch.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster_tasks.client import cluster
from cluster_tasks.client.dstack_run import ClusterError
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
