"""Recipes on a real Ray cluster of this machine: what a trainer is given, and TRL itself on CPUs, started, stopped and resumed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyarrow import Table, parquet
from support import recipe_stand_ins

from cluster_tasks.node.ports import free_port
from lab.copied import copy_project

pytestmark = [pytest.mark.hosts, pytest.mark.skipif(sys.platform != "linux", reason="the local cluster is for Linux")]


class Project:
    """A copy of the project, with a stand-in of verl first on the path."""

    def __init__(self, folder: Path):
        self.folder = folder
        copy_project(folder)
        recipe_stand_ins.verl_in(folder / "standins")
        self.stack = folder / "stacks/Pulumi.local.yaml"
        self.stack.write_text(self.stack.read_text().rstrip() + f"\n  flotilla:task:\n    dashboard_port: {free_port()}\n")
        self.shared = folder / "build/local/volumes/checkpoints"

    def run(self, *arguments: str, seconds: float = 500) -> subprocess.CompletedProcess[str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "FLOTILLA_", "PULUMI_"))}
        path = f"{self.folder / 'standins'}:{self.folder}"
        command = [sys.executable, "-m", "cli", *arguments]
        env |= {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
        return subprocess.run(
            command, cwd=self.folder, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds, check=False
        )


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    made = Project(tmp_path_factory.mktemp("recipes"))
    try:
        started = made.run("up", "local")
        assert started.returncode == 0, started.stdout + started.stderr
        yield made
    finally:
        made.run("down", "local")


@pytest.mark.slow
def test_trl_trains_on_every_node_and_resumes(project: Project, tiny_model: Path) -> None:
    """TRL itself: two processes on two nodes, two steps, then two more from the checkpoint of the first two."""
    prepared = project.shared / "data/gsm8k-chat"
    prepared.mkdir(parents=True)
    for split in ("train", "test"):
        rows = [{"prompt": f"{number}s{number}=", "completion": str(2 * number), "answer": str(2 * number)} for number in range(40)]
        parquet.write_table(Table.from_pylist(rows), prepared / f"{split}.parquet")
    words = ["trl/sft", f"model={tiny_model}", "run=tiny", "packages=image", "save_steps=2", "max_length=32"]
    done = project.run("submit", "local", "--recipe", *words, "max_steps=2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torchrun --nnodes=2 --nproc-per-node=1" in done.stdout
    assert (project.shared / "tiny/checkpoint-2").is_dir() and (project.shared / "tiny/model.safetensors").is_file()
    again = project.run("submit", "local", "--recipe", *words, "max_steps=4")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "--resume_from_checkpoint" in again.stdout and "tiny/checkpoint-2; it resumes" in again.stdout
    history = json.loads((project.shared / "tiny/checkpoint-4/trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in history if "loss" in entry] == [1, 2, 3, 4]
    words = ["trl/grpo-gsm8k", f"model={tiny_model}", "run=grpo", "packages=image", "max_completion_length=8", "max_steps=2"]
    grpo = project.run("submit", "local", "--recipe", *words)
    assert grpo.returncode == 0 and (project.shared / "grpo/model.safetensors").is_file(), grpo.stdout + grpo.stderr
    refused = project.run("submit", "local", "--recipe", *words, "no_such_setting=4")
    assert refused.returncode != 0 and "no_such_setting" in refused.stdout


def test_verl_is_given_the_stacks_sizes_and_folders_and_its_exit_code_comes_back(project: Project, tiny_model: Path) -> None:
    """By a stand-in that reserves none of the GPUs which the stack claims from here on."""
    project.stack.write_text(project.stack.read_text().replace('cpus: "1"', 'cpus: "1"\n      gpu: {count: 2}'))
    shared = project.shared
    (shared / "data/gsm8k-verl").mkdir(parents=True)  # prepared before
    words = ["--recipe", "verl/ppo-gsm8k", f"model={tiny_model}", "run=first", "packages=image", "trainer.save_freq=5"]
    done = project.run("submit", "local", *words)
    assert done.returncode == 0 and "TRAINED\n" in done.stdout, done.stdout + done.stderr
    said: dict[str, Any] = json.loads((shared / "first/said.json").read_text())
    assert {"trainer.nnodes=2", "trainer.n_gpus_per_node=2", "trainer.save_freq=5", f"critic.model.path={tiny_model}"} <= set(said["argv"])
    assert f"data.train_files={shared}/data/gsm8k-verl/train.parquet" in said["argv"] and "trainer.save_freq=10" not in said["argv"]
    assert said["env"]["PYTHONUNBUFFERED"] == "1" and said["env"]["RAY_ADDRESS"] and not said["resumed"]
    assert {"run.json", "cluster_tasks"} <= set(said["cwd"])
    again = project.run("submit", "local", *words)
    assert again.returncode == 7, again.stdout + again.stderr  # its own; it found what it had saved
    refused = project.run("submit", "local", *words, "no.such=1")
    assert refused.returncode == 2 and "its trainer refuses the settings (exit code 1): Could not override 'no.such'." in refused.stdout


def test_a_model_that_cannot_be_fetched_is_one_line(project: Project) -> None:
    done = project.run("submit", "local", "--recipe", "trl/sft", "model=nobody/none", "packages=image", "run=other")
    assert done.returncode == 2
    [line] = [line for line in done.stdout.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: model nobody/none failed with exit code 2: model nobody/none from http")
