"""The files of build/<stack>/: by Pulumi where there is one, else by the preview."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cluster_tasks.client import render
from stacks.errors import UserError
from stacks.schema import Stack

LAPTOP = {"name": "lab", "cloud": "local", "fleets": [{"name": "laptop", "nodes": 1}]}
Commands = list[tuple[list[str], dict[str, str]]]


def commands(root: Path, *, local: bool, yes: bool = False) -> tuple[Commands, list[str]]:
    made: Commands = []
    said: list[str] = []
    render.render("here", root, lambda command, env: made.append((command, env)), said.append, local=local, yes=yes)
    return made, said


def test_without_pulumi_the_preview_renders_and_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "pulumi_is_here", lambda: False)
    made, said = commands(tmp_path, local=False)
    assert made == [([sys.executable, "-m", "cli", "preview", "here"], {})]
    assert "no pulumi on PATH" in said[0]


@pytest.mark.parametrize(("yes", "flags"), [(False, []), (True, ["--yes"])])
def test_pulumi_asks_a_person_before_it_creates_anything_on_a_cloud(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, yes: bool, flags: list[str]
) -> None:
    monkeypatch.setattr(render, "pulumi_is_here", lambda: True)
    made, _ = commands(tmp_path, local=False, yes=yes)
    assert [command for command, _ in made] == [
        ["pulumi", "stack", "select", "--create", "here"],
        ["pulumi", "up", "--stack", "here", *flags],
    ]
    assert not any(env for _, env in made)  # the person's own backend and passphrase


def test_of_a_local_stack_the_file_stays_without_the_salt_of_its_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "pulumi_is_here", lambda: True)
    file = tmp_path / "stacks/Pulumi.here.yaml"
    file.parent.mkdir()
    file.write_text("config: {}\n")

    def salt(command: list[str], env: dict[str, str]) -> None:
        assert env["PULUMI_BACKEND_URL"] == f"file://{tmp_path / 'build/pulumi'}"
        file.write_text("encryptionsalt: v1\n")

    render.render("here", tmp_path, salt, print, local=True, yes=False)
    assert file.read_text() == "config: {}\n"


def test_a_value_that_the_shell_does_not_have_is_named_before_machines_are_made() -> None:
    wanting = Stack.model_validate({**LAPTOP, "task": {"env": {"HF_TOKEN": None, "WANDB_API_KEY": None, "MODE": "fast"}}})
    with pytest.raises(UserError, match=r"^stacks/Pulumi.lab.yaml: flotilla:task.env: not set in your shell: HF_TOKEN; first: export HF"):
        render.check_shell(wanting, {"WANDB_API_KEY": "key"})
    with pytest.raises(UserError, match="not set in your shell: HF_TOKEN, WANDB_API_KEY;"):
        render.check_shell(wanting, {})
    render.check_shell(wanting, {"HF_TOKEN": "", "WANDB_API_KEY": "key"})
