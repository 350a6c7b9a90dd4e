"""`pulumi up` for real, on a backend of files: what the preview shows is what the engine does."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cli.project import CommandError
from cli.render import main

pytestmark = pytest.mark.skipif(shutil.which("pulumi") is None, reason="no pulumi on PATH")


def contents(folder: Path) -> dict[str, str]:
    return {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*") if file.is_file()}


RESOURCES = 3  # the token, its component, the stack itself


def test_the_life_of_a_stack(project):
    folder = project.stack("onprem")
    assert project.up("onprem") == {"create": RESOURCES}
    made = contents(folder)
    assert {"node/__init__.py", "node/__main__.py", "node/agent.py"} <= made.keys()

    outputs = json.loads(project.must("stack", "output", "--stack", "onprem", "--json"))
    assert outputs["folder"] == "build/onprem"
    assert outputs["next"][-1].startswith("ray job submit ")
    assert outputs["token"] == outputs["files"] == "[secret]"
    assert made["ray.token"] not in project.must("stack", "export", "--stack", "onprem")
    assert (folder / "ray.token").stat().st_mode & 0o777 == 0o600

    # Edited by hand or deleted: `up` writes them again, though nothing in the stack has changed.
    (folder / "ray-cluster.dstack.yml").write_text("type: task\n")
    (folder / "env.sh").unlink()
    (folder / "ray.token").unlink()
    assert project.up("onprem") == {"same": RESOURCES}
    assert contents(folder) == made

    # A setting that reaches one file changes that file; a renamed fleet moves its file. A plan says so, and writes nothing.
    project.must("config", "set", "--stack", "onprem", "--path", "flotilla:task.join_timeout", "700")
    plan = project.must("preview", "--stack", "onprem")
    assert re.search(r"ray-cluster.dstack.yml *: *\"\w{12}\" => \"\w{12}\"", plan)
    assert contents(folder) == made
    assert project.up("onprem") == {"same": RESOURCES}
    assert "--join-timeout 700" in (folder / "ray-cluster.dstack.yml").read_text()
    project.must("config", "set", "--stack", "onprem", "--path", "flotilla:fleets[0].name", "hosts")
    project.up("onprem")
    assert [file.name for file in folder.glob("*.fleet.dstack.yml")] == ["hosts.fleet.dstack.yml"]
    assert contents(folder)["ray.token"] == made["ray.token"]

    project.must("destroy", "--stack", "onprem", "--yes")
    assert not folder.exists()


@pytest.fixture
def render(project, monkeypatch):
    """`flotilla render` of the copy."""
    for name, value in project.environment.items():
        monkeypatch.setenv(name, value)
    return lambda stack: main("render", [stack], project.folder)


def test_a_clone_without_build_shows_no_change_and_renders_the_same(project, render, capfd):
    folder = project.stack("onprem")
    project.up("onprem")
    made = contents(folder)
    shutil.rmtree(project.folder / "build")
    project.must("preview", "--stack", "onprem", "--refresh", "--expect-no-changes")
    assert not folder.exists()
    assert render("onprem") == 0
    assert made["ray.token"] not in "".join(capfd.readouterr())
    assert contents(folder) == made

    # A second person's `up` in a clone of their own keeps the team's token.
    (folder / "ray.token").write_text("of a preview")
    assert project.up("onprem") == {"same": RESOURCES}
    assert contents(folder) == made


def test_a_stack_that_was_never_brought_up_cannot_be_rendered(project, render):
    project.stack("onprem")
    with pytest.raises(CommandError, match="stack onprem has no rendered files among its outputs; first: pulumi up --stack onprem"):
        render("onprem")


def test_the_preview_writes_what_the_engine_writes(project):
    folder = project.stack("local")
    project.up("local")
    by_engine = contents(folder)
    shutil.rmtree(folder)
    subprocess.run([sys.executable, "-P", "-m", "infra.preview", "local"], cwd=project.folder, check=True, capture_output=True, timeout=500)
    by_preview = contents(folder)
    assert by_engine.pop("ray.token") != by_preview.pop("ray.token")  # each its own: the preview asks no state
    assert by_preview == by_engine
    project.must("destroy", "--stack", "local", "--yes")
    assert not folder.exists()
    subprocess.run([sys.executable, "-P", "-m", "infra.preview", "local"], cwd=project.folder, check=True, capture_output=True, timeout=500)
    previewed = (folder / "ray.token").read_text()
    project.up("local")
    assert (folder / "ray.token").read_text() == previewed  # a cluster may already run with it


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("flotilla:fleets[0].nodes", "x", "stacks/Pulumi.local.yaml: flotilla:fleets[0].nodes: 'x' is not an integer >= 1"),
        ("flotilla:flets", "x", "stacks/Pulumi.local.yaml: flotilla:flets: unknown key; did you mean fleets?"),
        ("flotilla:fleets[0].gpu.count", "512", "flotilla:fleets[0].gpu.count: 2 nodes with 512 GPUs each need 1024"),
    ],
)
def test_a_mistake_is_told_in_one_line_and_creates_nothing(project, path, value, message):
    folder = project.stack("local")
    project.must("config", "set", "--stack", "local", "--path", path, value)
    done = project.run("up", "--stack", "local", "--yes", "--skip-preview")
    assert done.returncode != 0
    assert message in re.sub(r"\.yaml:\d+:", ".yaml:", done.stdout + done.stderr)
    assert "Traceback" not in done.stdout + done.stderr
    assert not folder.exists()


def test_an_encrypted_setting_is_refused(project):
    project.stack("local")
    project.must("config", "set", "--stack", "local", "--secret", "--path", "flotilla:task.env.HF_TOKEN", "hunter2")
    done = project.run("up", "--stack", "local", "--yes", "--skip-preview")
    assert done.returncode != 0
    assert re.search(r"stacks/Pulumi.local.yaml:\d+: flotilla:task: is encrypted; rendered files are plain text", done.stdout + done.stderr)
    assert "hunter2" not in done.stdout + done.stderr
