"""What launch checks before it makes anything. With a dstack server it is tested in tests/integration/dstack/test_launch.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster_tasks.client import launch
from cluster_tasks.client.dstack_run import ClusterError
from stacks.schema import Stack

FLEET = {"name": "laptop", "nodes": 1}


def stack(**task: Any) -> Stack:
    return Stack.model_validate({"name": "lab", "cloud": "local", "fleets": [FLEET], "task": task})


def test_a_value_that_the_shell_does_not_have_is_named_before_machines_are_made() -> None:
    wanting = stack(env={"HF_TOKEN": None, "WANDB_API_KEY": None, "MODE": "fast"})
    with pytest.raises(
        ClusterError, match=r"^stacks/Pulumi.lab.yaml: flotilla:task.env: not set in your shell: HF_TOKEN; first: export HF"
    ):
        launch.check_shell(wanting, {"WANDB_API_KEY": "key"})
    with pytest.raises(ClusterError, match="not set in your shell: HF_TOKEN, WANDB_API_KEY;"):
        launch.check_shell(wanting, {})
    launch.check_shell(wanting, {"HF_TOKEN": "", "WANDB_API_KEY": "key"})


def test_a_stack_without_its_files_names_the_command_that_makes_them(tmp_path: Path) -> None:
    (tmp_path / "ray.token").touch()
    with pytest.raises(ClusterError, match=r"ray-cluster.dstack.yml is missing; first: pulumi up --stack lab, or .* infra.preview lab"):
        launch.environment(stack(), tmp_path, "http://localhost:8265")


def test_the_environment_of_its_commands_is_that_of_env_sh(tmp_path: Path) -> None:
    for name, text in (("ray.token", "secret\n"), ("ray-cluster.dstack.yml", "")):
        (tmp_path / name).write_text(text)
    env = launch.environment(stack(), tmp_path, "http://localhost:1")
    assert (env["RAY_AUTH_TOKEN"], env["RAY_AUTH_MODE"], env["RAY_ADDRESS"]) == ("secret", "token", "http://localhost:1")
    assert env["FLOTILLA_STACK"] == tmp_path.name
