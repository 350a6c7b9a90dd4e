"""`pulumi up` for real, on a backend of files: what the preview shows is what the engine does."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("pulumi") is None, reason="no pulumi on PATH")


def contents(folder: Path) -> dict[str, str]:
    return {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*") if file.is_file()}


def test_the_life_of_a_stack(project):
    folder = project.stack("onprem")
    created = project.up("onprem")
    made, count = contents(folder), len(list(folder.iterdir())) + 2
    assert created == {"create": count}  # the files, the folder of the node agent, their component, the stack itself
    assert {"node/__init__.py", "node/__main__.py", "node/agent.py"} <= made.keys()

    outputs = json.loads(project.must("stack", "output", "--stack", "onprem", "--json"))
    assert outputs["folder"] == "build/onprem"
    assert outputs["next"][-1].startswith("ray job submit ")
    assert made["ray.token"] not in project.must("stack", "export", "--stack", "onprem", "--show-secrets")

    assert project.up("onprem") == {"same": count}
    assert contents(folder) == made

    # Edited by hand, deleted, added: all is made good by `up` alone, without a refresh.
    (folder / "ray-cluster.dstack.yml").write_text("type: task\n")
    (folder / "env.sh").unlink()
    (folder / "node/agent.py").rename(folder / "node/old.py")
    assert project.up("onprem") == {"same": count - 3, "update": 3}
    assert contents(folder) == made

    # The same after a refresh, which takes the edit into the state first.
    (folder / "ray-cluster.dstack.yml").write_text("type: task\n")
    (folder / "env.sh").unlink()
    (folder / "node/agent.py").rename(folder / "node/old.py")
    project.must("refresh", "--stack", "onprem", "--yes", "--skip-preview")
    project.up("onprem")
    assert contents(folder) == made

    # A setting that reaches one file changes that file; a renamed fleet moves its file.
    project.must("config", "set", "--stack", "onprem", "--path", "flotilla:task.join_timeout", "700")
    assert project.up("onprem") == {"same": count - 1, "update": 1}
    assert "--join-timeout 700" in (folder / "ray-cluster.dstack.yml").read_text()
    project.must("config", "set", "--stack", "onprem", "--path", "flotilla:fleets[0].name", "hosts")
    project.up("onprem")
    assert [file.name for file in folder.glob("*.fleet.dstack.yml")] == ["hosts.fleet.dstack.yml"]
    assert contents(folder)["ray.token"] == made["ray.token"]

    project.must("destroy", "--stack", "onprem", "--yes")
    assert not folder.exists()


def test_the_preview_writes_what_the_engine_writes(project):
    folder = project.stack("local")
    project.up("local")
    by_engine = contents(folder)
    shutil.rmtree(folder)
    subprocess.run([sys.executable, "-P", "-m", "infra.preview", "local"], cwd=project.folder, check=True, capture_output=True, timeout=240)
    assert contents(folder) == by_engine


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
