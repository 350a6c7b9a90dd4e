"""`flotilla preview`: the very program that `pulumi up` runs, in a project of its own, without Pulumi's CLI."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from infra.preview import plan
from stacks import load
from stacks.load import StackError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def project(tmp_path):
    """A copy of what the program reads: its packages are the installed ones."""
    shutil.copy(ROOT / "Pulumi.yaml", tmp_path)
    shutil.copytree(ROOT / "stacks", tmp_path / "stacks", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    (tmp_path / "infra").mkdir()
    shutil.copy(ROOT / "infra/__main__.py", tmp_path / "infra")
    return tmp_path


def edit(project: Path, stack: str, change) -> None:
    file = project / f"stacks/Pulumi.{stack}.yaml"
    content = yaml.safe_load(file.read_text())
    change(content["config"])
    file.write_text(yaml.safe_dump(content))


@pytest.mark.parametrize("name", load.names(ROOT))
def test_every_stack_is_planned_and_its_files_are_written(project, name, preview):
    done = preview(project, name)
    assert done.returncode == 0, done.stderr
    *summary, empty, first = done.stdout.splitlines()[:7]
    assert [line.split()[0] for line in summary] == ["hosts", "GPUs", "price", "idle", "budget"] and not empty
    written = {file.name for file in (project / "build" / name).iterdir() if not file.name.startswith(".")} - {"ray.token"}
    assert first == f"{name}  {done.stdout.count('── + ')} resources"
    [said] = [line for line in done.stdout.splitlines() if line.startswith(f"wrote build/{name}/: ")]
    assert set(said.partition("/: ")[2].split(", ")) == written
    last = {"slurm": "sbatch", "local": "flotilla submit local", "onprem": "ray job submit", "anywhere": "ray job submit"}.get(
        name, f"  pulumi up --stack {name}"
    )
    assert last in done.stdout.splitlines()[-1]  # of a cloud nothing is there yet


def test_the_plan_nests_resources_below_their_component(project, preview):
    tree = preview(project, "local").stdout.splitlines()[6:]
    assert tree[1].startswith("└── + Publication local")
    assert tree[2].startswith("    └── + Token ")


def test_no_line_is_cut_where_no_terminal_sets_a_width(project, preview):
    lines = [line for line in preview(project, "gcp-dev", "--no-prices").stdout.splitlines() if " IAMMember " in line]
    assert len(lines) == 3
    assert all(" role=" in line for line in lines)


def test_checkpoints_that_nodes_do_not_share_are_warned_of(project, preview):
    assert "warnings" not in plan("onprem", project).outputs
    edit(project, "onprem", lambda config: config.update({"flotilla:checkpoints": {"kind": "instance"}}))
    [warning] = plan("onprem", project).outputs["warnings"]
    assert warning.startswith("flotilla:checkpoints.kind: instance is a folder of each node: the 2 nodes of fleet 'gpus' do not share")
    assert warning.endswith("; take shared")
    assert "warnings" not in plan("local", project).outputs  # the next plan of a process has outputs of its own
    assert f"warning: {warning}" in preview(project, "onprem").stdout
    edit(project, "onprem", lambda config: config["flotilla:fleets"][0]["ssh"]["hosts"].pop())
    assert "warning" not in preview(project, "onprem").stdout  # one node finds its own folder again


def test_json_is_the_plan_and_holds_no_token(project, preview):
    done = preview(project, "onprem", "--json")
    planned = json.loads(done.stdout)
    assert {"stack": planned["stack"], "folder": planned["outputs"]["folder"]} == {"stack": "onprem", "folder": "build/onprem"}
    token = project / "build/onprem/ray.token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert token.read_text() not in done.stdout
    assert [resource["name"] for resource in planned["resources"] if resource["type"].endswith(":Token")] == ["ray.token"]


def test_a_second_run_keeps_the_token_and_drops_fleets_that_are_gone(project, preview):
    preview(project, "onprem")
    folder = project / "build/onprem"
    token = (folder / "ray.token").read_text()
    (folder / "notes.txt").touch()
    edit(project, "onprem", lambda config: config["flotilla:fleets"][0].update(name="hosts"))
    assert preview(project, "onprem").returncode == 0
    assert sorted(file.name for file in folder.glob("*.fleet.dstack.yml")) == ["hosts.fleet.dstack.yml"]
    assert (folder / "ray.token").read_text() == token
    assert (folder / "notes.txt").exists()


def test_an_unknown_stack_ends_with_2_and_the_names_that_there_are(project, preview):
    done = preview(project, "locl")
    assert done.returncode == 2
    there_are = ", ".join(load.names(ROOT))
    assert done.stderr == f"there is no stack 'locl' (stacks/Pulumi.locl.yaml does not exist); the stacks are: {there_are}\n"
    assert not done.stdout


def test_a_mistake_ends_with_2_and_one_line_and_writes_nothing(project, preview):
    edit(project, "local", lambda config: config["flotilla:fleets"][0].update(nodes="x"))
    done = preview(project, "local")
    assert done.returncode == 2
    line = "stacks/Pulumi.local.yaml: flotilla:fleets[0].nodes: 'x' is not an integer >= 1, or a range such as 0..8 for role: rollout\n"
    assert re.sub(r":\d+:", ":", done.stderr, count=1) == line
    assert not (project / "build").exists()


def test_errors_of_types_rules_and_machine_types_are_printed_in_one_round(project, preview):
    def change(config):
        config["flotilla:fleets"] = [{"name": "more", "nodes": "x", "machine": "p5", "cpus": 0}, config["flotilla:fleets"][0]]
        config["flotilla:fleets"][1].update(cpus=64, image="ami-0123456789abcdef0")
        config["flotilla:checkpoints"] = {"kind": "filestore", "size": "1TB"}

    edit(project, "aws-dev", change)
    done = preview(project, "aws-dev")
    assert done.returncode == 2
    said = [re.fullmatch(r"stacks/Pulumi.aws-dev.yaml:\d+: flotilla:(\S+): .+", line) for line in done.stderr.splitlines()]
    assert sorted(line[1] for line in said if line) == [
        "checkpoints.kind",
        "fleets[0].cpus",
        "fleets[0].machine",
        "fleets[0].nodes",
        "fleets[1].cpus",
        "fleets[1].image",
    ]
    assert None not in said and not (project / "build").exists()


def test_more_gpus_than_this_machine_has_are_refused_with_both_numbers(project, preview):
    edit(project, "local", lambda config: config["flotilla:fleets"][0].update(nodes=2, gpu={"count": 512}))
    done = preview(project, "local")
    assert done.returncode == 2
    assert "flotilla:fleets[0].gpu.count: 2 nodes with 512 GPUs each need 1024, but this machine has " in done.stderr
    assert "Traceback" not in done.stderr
    assert not (project / "build").exists()


def test_outside_of_a_project_it_says_so(tmp_path, preview):
    done = preview(tmp_path, "local")
    assert done.returncode == 2
    assert done.stderr.startswith("no Pulumi.yaml in ")


def test_a_plan_can_be_made_twice_in_one_process_and_leaves_the_current_folder_alone():
    here = Path.cwd()
    assert plan("local", ROOT).resources == plan("local", ROOT).resources
    assert Path.cwd() == here
    with pytest.raises(StackError):
        plan("nope", ROOT)


def test_a_narrow_terminal_shows_where_a_line_is_cut(project):
    """On a pseudo-terminal of 80 columns, as a person sees it."""
    outer, inner = os.openpty()
    command = [sys.executable, "-P", "-m", "infra.preview", "gcp-dev", "--no-prices"]
    environment = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1", "TERM": "xterm"}
    with subprocess.Popen(command, cwd=project, env=environment, stdout=inner, stderr=inner) as process:
        os.close(inner)
        shown = b""
        with contextlib.suppress(OSError):  # how Linux says that the other end is closed
            while chunk := os.read(outer, 65536):
                shown += chunk
    os.close(outer)
    assert process.returncode == 0
    tree = [line for line in re.sub(r"\x1b\[[0-9;]*m", "", shown.decode()).splitlines() if "── " in line]
    assert all(len(line) <= 80 for line in tree)
    assert any(line.rstrip().endswith("…") for line in tree)


@pytest.mark.parametrize("name", ["preview", "preflight"])
def test_an_interrupt_ends_a_command_with_one_line_while_it_still_imports(project, name):
    command = [sys.executable, "-P", "-X", "importtime", "-m", f"infra.{name}", "aws-dev"]
    with subprocess.Popen(command, cwd=project, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        for line in process.stderr:  # the first import after the handler is in place
            if line.split("|")[-1].strip().partition(".")[0] in ("rich", "grpc", "pydantic", "pulumi"):
                break
        process.send_signal(signal.SIGINT)
        printed = [line for line in process.stderr if not line.startswith("import time:")]
    assert (process.returncode, printed) == (130, ["interrupted\n"])


@pytest.mark.parametrize("module", ["infra", "infra.policy"])
def test_what_only_the_engine_runs_says_so(module):
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", module, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
        )

    asked, bare = run("--help"), run()
    assert (asked.returncode, asked.stderr, bare.returncode, bare.stdout) == (0, "", 2, "")
    assert asked.stdout == bare.stderr and "pulumi" in asked.stdout
