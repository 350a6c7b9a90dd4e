"""A recipe as a file: a task that dstack's own parser reads, a script that bash runs, each with all that it names."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli import recipes
from cluster_tasks import ray, slurm
from cluster_tasks.node.settings import Settings, read_settings
from cluster_tasks.recipes import find
from cluster_tasks.recipes.as_file import Kind, as_file
from cluster_tasks.recipes.planned import plan
from cluster_tasks.recipes.recipe import RecipeError
from infra.ssh import build as ssh
from stacks.dstack_api import TaskConfiguration, parse_apply_configuration
from stacks.load import parse
from stacks.schema import Stack
from stacks.site import Site

SSH = {"user": "ubuntu", "identity_file": "~/.ssh/key", "network": "10.0.0.0/24"}
GPUS = {"name": "gpus", "gpu": {"name": "H100", "count": 8}, "ssh": SSH | {"hosts": [{"hostname": "a"}, {"hostname": "b"}]}}
HEAD = {"name": "head", "cpus": 16, "ssh": SSH | {"hosts": [{"hostname": "c"}]}}
JOB = "python -m cluster_tasks.recipes.job run.json"


def hosts(*fleets: dict[str, Any]) -> Stack:
    task = {"image": "me/ray:1", "fleets": [fleet["name"] for fleet in fleets]}
    return parse(
        "lab",
        {
            "flotilla:cloud": "ssh",
            "flotilla:fleets": fleets,
            "flotilla:task": task,
            "flotilla:checkpoints": {"kind": "shared", "path": "/mnt"},
        },
    )


def batch(shared: Path) -> Stack:
    fleet = {"name": "gpus", "nodes": 2, "cpus": 96, "gpu": {"name": "H100", "count": 8}}
    values = {"cloud": "slurm", "fleets": [fleet], "checkpoints": {"kind": "shared", "path": str(shared)}, "slurm": {"partition": "gpu"}}
    return parse("lab", {f"flotilla:{key}": value for key, value in values.items()})


def written(kind: Kind, stack: Stack, root: Path, *words: str) -> tuple[Path, str]:
    """After what `pulumi up` renders of the stack."""
    build = root / "build" / stack.name
    build.mkdir(parents=True)
    (build / "runtime-env.yaml").write_text("env_vars: {RAY_JOB_STOP_WAIT_TIME_S: '30'}\n")
    (build / "node").mkdir()
    if stack.cloud == "ssh":
        (build / "ray-cluster.dstack.yml").write_text(yaml.safe_dump(ray.ray_cluster(stack, ssh.build(stack))))
    else:
        of_cluster = Site(gpu_types={"gpus": "hopper"})  # the cluster's own word, which Slurm was asked for
        (build / "ray-cluster.sbatch").write_text(slurm.render(stack, of_cluster, slurm.SCRIPTS[0]))
    return as_file(kind, plan(stack, find("verl/ppo-gsm8k"), words, root), stack, root)


def agent(words: list[str]) -> Settings:
    return read_settings(words, {"DSTACK_NODE_RANK": "0", "DSTACK_NODES_IPS": "10.0.0.1\n10.0.0.2\n10.0.0.3"})


@pytest.mark.parametrize("fleets", [(GPUS,), (HEAD, GPUS)])
def test_dstack_reads_the_task_and_finds_what_it_names(fleets: tuple[dict[str, Any], ...], tmp_path: Path) -> None:
    file, submit = written("dstack", hosts(*fleets), tmp_path, "run=my.run_1")
    task = parse_apply_configuration(yaml.safe_load(file.read_text()))
    assert isinstance(task, TaskConfiguration)
    assert task.name == "recipe-my-run-1" and submit == ". build/lab/env.sh && dstack apply -f build/lab/recipe-my-run-1.dstack.yml"
    for command in [group.commands[-1] for group in task.groups or []] or [task.commands[-1]]:
        settings = agent(shlex.split(command)[3:])
        assert (settings.job, settings.working_dir, settings.runtime_env) == (JOB, "project", "runtime-env.yaml")
    brought = {file.path: tmp_path / "build/lab" / file.local_path for file in task.files}
    assert all(path.exists() for path in brought.values()), brought
    run = json.loads((brought["project"] / "run.json").read_text())
    assert (run["nodes"], run["gpus"], run["folder"]) == (2, 8, "/checkpoints/my.run_1")
    assert yaml.safe_load(brought["runtime-env.yaml"].read_text())["pip"] == ["verl[vllm]==0.9.1"]
    assert (brought["project"] / "cluster_tasks/recipes/job/__main__.py").is_file()


def test_a_long_name_of_a_run_is_one_that_dstack_takes(tmp_path: Path) -> None:
    file, _ = written("dstack", hosts(GPUS), tmp_path, "run=" + "a-" * 30 + "b")
    task = parse_apply_configuration(yaml.safe_load(file.read_text()))
    assert task.name and len(task.name) <= 41


SRUN = 'for word; do printf "%s\\n" "$word"; done >"$RECORD/words$(case "$*" in *--job*) echo .head;; esac)"\n'


def test_the_script_starts_the_agents_with_the_run_and_ends_with_its_code(tmp_path: Path) -> None:
    """By bash, with stand-ins of Slurm's commands."""
    file, submit = written("sbatch", batch(tmp_path / "shared"), tmp_path)
    text = file.read_text()
    assert submit == "sbatch build/lab/recipe-verl-ppo-gsm8k.sbatch" and f":  {submit}\n" in text
    assert "#SBATCH --gpus-per-node=hopper:8\n" in text and "#SBATCH --job-name=recipe-verl-ppo-gsm8k\n" in text
    for name, program in (("srun", SRUN + "exit 9\n"), ("scontrol", "echo n1; echo n2\n")):
        (tmp_path / name).write_text(f"#!/bin/bash\n{program}")
        (tmp_path / name).chmod(0o755)
    env = {"SLURM_NNODES": "2", "SLURM_CPUS_PER_TASK": "96", "SLURM_JOB_ID": "7", "RECORD": str(tmp_path)}
    env |= {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", file], cwd=tmp_path, env=os.environ | env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 9, done.stderr
    words = (tmp_path / "words.head").read_text()
    flags = dict(zip(*[iter(words[words.rindex("--working-dir") :].splitlines())] * 2, strict=True))
    assert shlex.split(flags["--job"]) == shlex.split(JOB)
    run = json.loads((tmp_path / flags["--working-dir"] / "run.json").read_text())
    assert run["folder"] == f"{tmp_path}/shared/verl-ppo-gsm8k" and Path(flags["--runtime-env"]).is_file()


def test_a_stack_that_does_not_start_that_way_is_refused(tmp_path: Path) -> None:
    def refused(kind: Kind, stack: Stack) -> str:
        with pytest.raises(RecipeError) as raised:
            as_file(kind, plan(stack, find("trl/sft"), [], tmp_path), stack, tmp_path)
        return str(raised.value)

    local = parse("local", {"flotilla:cloud": "local", "flotilla:fleets": [{"name": "nodes", "nodes": 2}]})
    assert refused("sbatch", hosts(GPUS)) == "--as sbatch: flotilla:cloud: ssh of lab takes dstack"
    assert refused("dstack", batch(tmp_path)) == "--as dstack: flotilla:cloud: slurm of lab takes sbatch"
    assert refused("dstack", local).endswith("of local is this machine; flotilla launch local --recipe runs it there")
    missing = "build/lab/ray-cluster.sbatch does not exist; first: pulumi up --stack lab, or flotilla preview lab"
    assert refused("sbatch", batch(tmp_path)) == missing


def test_a_file_needs_a_stack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        recipes.main("recipe", ["show", "--as", "sbatch", "trl/sft"], tmp_path)
    assert "--as sbatch needs a STACK" in capsys.readouterr().err
