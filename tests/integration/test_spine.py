"""From a stack file to a trained model, with the commands that the README shows: render, start, submit, kill, submit again, stop."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from support.paths import python_path

from cluster_tasks.identity import environment
from cluster_tasks.local.plan import MARKER
from cluster_tasks.node.ports import free_port
from lab.copied import copy_project
from lab.local import command

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the local cluster is for Linux")

ROOT = Path(__file__).parents[2]
RAY = str(Path(sys.executable).parent / "ray")
STEPS = ["trainer.steps=12", "trainer.checkpoint_every=4", "trainer.eval_prompts=32", "trainer.prompts_per_step=16"]


def python(project: Path, *arguments: str, **environment: str) -> str:
    """Output of `python ...` in the project's folder; a failure shows it."""
    env = (
        {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        | {"PYTHONPATH": python_path(project)}
        | environment
    )
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=project,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def submit(address: str, project: Path, name: str) -> subprocess.Popen[str]:
    """The README's line for the kept cluster, on a run of its own."""
    train = ["python", "-m", "trainer.train_ppo", "--config", "trainer/recipes/demo.yaml", f"run.name={name}", *STEPS]
    line = [RAY, "job", "submit", "--address", address, "--working-dir", ".", "--", *train]
    env = sourced(address, project)
    return subprocess.Popen(line, cwd=project, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def sourced(address: str, project: Path) -> dict[str, str]:
    """The environment after `. build/local/env.sh`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return kept | environment(project / "build/local", address)


def shell(address: str, project: Path, lines: str) -> None:
    """Run lines of a page in the project's folder, with its environment active, in which `flotilla` is the copy's own."""
    env = sourced(address, project)
    command = project / "bin/flotilla"
    command.parent.mkdir(exist_ok=True)
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m cli "$@"\n')
    command.chmod(0o755)
    env["PATH"] = f"{command.parent}:{Path(sys.executable).parent}:{env['PATH']}"
    done = subprocess.run(
        ["bash", "-ec", lines], cwd=project, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is needed of this project, whose stack `local` has a dashboard port of its own."""
    folder = tmp_path_factory.mktemp("project")
    copy_project(folder)
    stack = folder / "stacks/Pulumi.local.yaml"
    stack.write_text(stack.read_text().rstrip() + f"\n  flotilla:task:\n    dashboard_port: {free_port()}\n")
    return folder


@pytest.fixture(scope="module")
def cluster(project: Path):
    """The rendered task as a cluster with a warm-started model. Yields the address that `env.sh` sets."""
    assert "ray-cluster.dstack.yml" in python(project, "-m", "infra.preview", "local")
    task = "build/local/ray-cluster.dstack.yml"
    python(project, "-m", "cluster_tasks.local", "up", task)
    try:
        address = json.loads((project / "build/local/cluster.json").read_text())["dashboard"]
        assert f"RAY_ADDRESS={address.replace('127.0.0.1', 'localhost')}" in (project / "build/local/env.sh").read_text()
        runs = str(project / "build/local/runs")
        python(project, "-m", "trainer.train_sft", "--config", "trainer/recipes/demo-sft.yaml", FLOTILLA_RUNS=runs)
        yield address
    finally:
        python(project, "-m", "cluster_tasks.local", "down", task)


@pytest.mark.wide
def test_own_data_and_reward_train_as_the_page_says(project, cluster):
    """The blocks of docs/local.md, in their order; fewer steps."""
    section = (ROOT / "docs/local.md").read_text().partition("## Your own data and reward")[2].partition("\n## ")[0]
    (_, data), (_, reward), (_, settings), (_, train) = re.findall(r"^```(\w*)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    shell(cluster, project, data)
    (project / "mine/rewards.py").write_text(reward)
    (project / "mine/run.yaml").write_text(settings)
    shell(cluster, project, train.rstrip() + " trainer.steps=2 trainer.eval_prompts=0 trainer.prompts_per_step=8")
    metrics = (project / "build/local/runs/words/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in metrics] == [1, 2]
    assert 0 < json.loads(metrics[0])["reward"] < 1
    assert (project / "build/local/runs/words/model/model.safetensors").stat().st_size > 0


def process_of(project: Path, title: str) -> psutil.Process:
    """The process of the cluster that Ray gave this title."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARKER) == str(project / "build/local") and process.cmdline()[0].startswith(title):
                return process
        except (psutil.Error, IndexError):
            continue
    raise AssertionError(f"no process of the cluster is {title}")


def wait_for_step(step: int, metrics: Path, job: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 200
    while not metrics.exists() or len(metrics.read_text().splitlines()) <= step:  # the evaluation at step 0 has a line too
        assert time.monotonic() < deadline, f"step {step}: not within 200 s"
        assert job.poll() is None, job.communicate()[0]
        time.sleep(0.05)


NIGHT_REWARD = """
import time
from pathlib import Path


def reward(text, row, *, step, folder):
    first = Path(folder, f"step-{step}")  # that this step was seen
    new = not first.exists()
    first.touch()
    if new and step == 3:
        raise RuntimeError("the judge is away")
    if new and step == 4:
        time.sleep(600)
    storm = step in (6, 7) and not Path(folder, "calm").exists()
    if step == 5 and Path(folder, "step-6").exists():
        Path(folder, "calm").touch()
    return len(text) * 1e38 if storm else sum(a == b for a, b in zip(text, row["answer"])) / len(row["answer"])
"""
NIGHT = """
model: {path: "run:demo-sft", dtype: float32}
data: {path: "trainer.data.tasks:sort_digits", args: {rows: 500, length: 8}, max_prompt_tokens: 16}
algorithm: {name: dr_grpo, group_size: 4}
reward: {function: "mine.night:reward", on_error: zero, answer_timeout: 3, args: {folder: FOLDER}}
rollout: {engine: hf, max_new_tokens: 10}
optim: {lr: 5.0e-4}
placement: {gpus_per_rank: 0, threads: 1}
divergence: {patience: 2, grad_norm: 1.0e+6}
trainer: {steps: 14, prompts_per_step: 16, checkpoint_every: 2, keep_checkpoints: 4, eval_prompts: 0, silence: 10}
run: {name: night}
"""


@pytest.mark.slow
def test_a_night_of_lost_rewards_divergence_a_hang_and_a_dead_driver_ends_with_a_model_and_its_story(project, cluster, tmp_path):
    mine = project / "mine"
    mine.mkdir(exist_ok=True)
    (mine / "night.py").write_text(NIGHT_REWARD)
    (mine / "night.yaml").write_text(NIGHT.replace("FOLDER", str(tmp_path)))
    train = ["python", "-m", "trainer.train_ppo", "--config", "mine/night.yaml"]
    line = [RAY, "job", "submit", "--address", cluster, "--working-dir", ".", "--", "python", "-m", "trainer.supervise", "--", *train]
    job = subprocess.Popen(line, cwd=project, env=sourced(cluster, project), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    run = project / "build/local/runs/night"
    wait_for_step(9, run / "metrics.jsonl", job)
    process_of(project, "ray::RolloutActor").suspend()
    faults = run / "faults.jsonl"
    wait_for(lambda: "rollout-0: the process died; started again" in faults.read_text(), job)
    drivers = [p for p in psutil.process_iter() if command(p)[1:] == train[1:]]
    min(drivers, key=psutil.Process.create_time).kill()  # a child that it has just forked has its words until it has its own
    output = job.communicate(timeout=500)[0]
    assert job.returncode == 0, output
    assert [row["step"] for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())] == list(range(1, 15))
    assert (run / "model/model.safetensors").stat().st_size > 0

    python(project, "-m", "trainer.report", str(run))
    page = html.unescape((run / "report.html").read_text())
    for story in (
        "RuntimeError('the judge is away')",
        "did not end within 3 s (reward.answer_timeout",
        "the gradients of 2 steps in a row were not finite, or above divergence.grad_norm",
        " s (trainer.silence)",  # "gave no sign of life for", or "did nothing for" where its last one said that it had nothing to do
        "rollout-0: the process died; started again (1 of 3, rollout.restarts)",
        "the driver was ended by SIGKILL",
    ):
        assert story in page, (story, faults.read_text())


def wait_for(happened: Callable[[], bool], job: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 200
    while not happened():
        assert time.monotonic() < deadline
        assert job.poll() is None, job.communicate()[0]
        time.sleep(0.05)


@pytest.mark.slow
def test_the_demo_recipe_as_a_job_survives_kill_9_bit_for_bit(project, cluster):
    runs = project / "build/local/runs"
    whole = submit(cluster, project, "whole")
    output = whole.communicate(timeout=500)[0]
    assert whole.returncode == 0, output
    assert "succeeded" in output

    killed = submit(cluster, project, "killed")
    metrics = runs / "killed/metrics.jsonl"
    wait_for_step(2, metrics, killed)
    process_of(project, "ray::RolloutActor").kill()  # in which vLLM runs
    wait_for_step(6, metrics, killed)
    process_of(project, "ray::Worker").kill()  # the policy
    output = killed.communicate(timeout=300)[0]
    assert killed.returncode == 1, output
    assert "rollout-0: the process died; started again (1 of 3, rollout.restarts)" in output
    assert " died: The actor died" in output

    resumed = submit(cluster, project, "killed")
    output = resumed.communicate(timeout=500)[0]
    assert resumed.returncode == 0, output
    assert "step 4 of 12" in output, "it resumes from the last complete checkpoint"
    compared = python(project, "-m", "trainer.compare", str(runs / "whole"), str(runs / "killed"))
    assert "equal" in compared

    rows = [json.loads(line) for line in (runs / "killed/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(13))
    for name in ("model/model.safetensors", "plot.png", "run.yaml"):
        assert (runs / "killed" / name).stat().st_size > 0, name
