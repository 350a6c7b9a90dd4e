"""Seconds of the same GRPO run's steps on two nodes that Slurm started, that dstack started, and that are processes of this machine.

All three are the demo's recipe with one rank and one rollout engine, a node each, and one thread each; in turns, so that a busy minute
meets all of them. Slurm and the dstack server with its hosts are those of `lab/`, on this machine's cores. Needs root.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import lab.dstack.lab as dstack_lab
import lab.slurm.cluster as slurm_lab
from benchmarks.report import Ratio, Report
from lab import local as local_lab
from lab.slurm.project import Project

ROOT = Path(__file__).resolve().parents[1]
ROUNDS, STEPS, FIRST = 2, 18, 4  # steps before FIRST warm up
DEADLINE = 600  # seconds
LIMIT = 1.15  # where the nodes came from should not be seen in a step
SETTINGS = [f"trainer.steps={STEPS}", "trainer.eval_prompts=0", "trainer.checkpoint_every=1000", "rollout.engine=hf", "placement.threads=1"]
PPO = ["python", "-m", "trainer.train_ppo", "--config", "trainer/recipes/demo.yaml", *SETTINGS, "log.tensorboard=false", "log.plot=false"]
SFT = ["python", "-m", "trainer.train_sft", "--config", "trainer/recipes/demo-sft.yaml", "trainer.steps=20"]

Train = Callable[[str], Path]  # trains a run of this name; its folder


def run() -> Report:
    taken: dict[str, list[float]] = {"Slurm": [], "dstack": [], "this machine": []}
    with (
        tempfile.TemporaryDirectory(prefix="schedulers-") as folder,
        slurm(Path(folder)) as on_slurm,
        dstack() as on_dstack,
        local(Path(folder)) as here,
    ):
        schedulers: dict[str, Train] = {"Slurm": on_slurm, "dstack": on_dstack, "this machine": here}
        for round_ in range(ROUNDS):
            for name, train in schedulers.items():
                taken[name] += step_seconds(train(f"round-{round_}"))
    seconds = {name: statistics.median(steps) for name, steps in taken.items()}
    return Report(
        "schedulers",
        [
            Ratio(f"step on nodes of {name} / on nodes of this machine", seconds[name] / seconds["this machine"], LIMIT)
            for name in ("Slurm", "dstack")
        ],
        {"seconds of a step": {name: round(value, 3) for name, value in seconds.items()}},
        taken,
    )


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[Train]:
    """`sbatch build/slurm/ray-ppo.sbatch` on two nodes."""
    if reason := slurm_lab.lacking():
        raise SystemExit(f"python -m benchmarks schedulers: {reason}")
    cluster = slurm_lab.Cluster(folder / "shared").start()
    try:
        project = Project(cluster, cluster.folder / "project")
        project.render(fleets=[{"name": "gpus", "nodes": 2, "cpus": 1}])
        runs = project.folder / "runs"
        must([sys.executable, *SFT[1:]], project.folder, runs)
        yield lambda name: by_slurm(project, runs, name)
    finally:
        cluster.stop()


def by_slurm(project: Project, runs: Path, name: str) -> Path:
    job = project.submit("ray-ppo", *PPO, f"run.name={name}")
    if (state := project.cluster.ended(job, DEADLINE))["ExitCode"] != "0:0":
        raise RuntimeError(f"the Slurm job ended with {state['ExitCode']}:\n{project.log('ray-ppo', job)[-3000:]}")
    return runs / name


@contextlib.contextmanager
def dstack() -> Iterator[Train]:
    """`dstack apply -f build/lab/ray-job.dstack.yml` on two hosts."""
    if reason := dstack_lab.lacking():
        raise SystemExit(f"python -m benchmarks schedulers: {reason}")
    with dstack_lab.Lab(hosts=2) as hosts:
        hosts.stack()
        hosts.fleet()
        hosts.must(f"FLOTILLA_RUNS={hosts.shared} {' '.join(SFT)}")
        yield lambda name: by_dstack(hosts, name)


def by_dstack(hosts: dstack_lab.Lab, name: str) -> Path:
    hosts.stack(task={"job": {"command": " ".join([*PPO, f"run.name={name}"])}})
    hosts.must(". build/lab/env.sh; dstack apply -y -d -f build/lab/ray-job.dstack.yml")
    hosts.wait_run("ray-job", "done", timeout=DEADLINE)
    hosts.wait_idle()
    return hosts.shared / name


@contextlib.contextmanager
def local(folder: Path) -> Iterator[Train]:
    """`python -m cluster_tasks.local up` with two nodes, and `ray job submit`; down again after each run."""
    cluster = local_lab.render(folder, {"name": "laptop", "nodes": 2, "cpus": 1})
    runs = cluster.root / "volumes/checkpoints"
    must([sys.executable, *SFT[1:]], ROOT, runs)
    yield lambda name: by_local(cluster, runs, name)


def by_local(cluster: local_lab.Cluster, runs: Path, name: str) -> Path:
    try:
        for done in (cluster.local("up"), cluster.job(*PPO, f"run.name={name}", flags=local_lab.PROJECT, timeout=DEADLINE)):
            if done.returncode:
                raise RuntimeError(f"on this machine, exit code {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    finally:
        cluster.local("down")
    return runs / name


def must(command: list[str], folder: Path, runs: Path) -> None:
    env = os.environ | {"FLOTILLA_RUNS": str(runs)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=DEADLINE, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:4])} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")


def step_seconds(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["seconds"] for line in lines if line.get("step", 0) >= FIRST and "seconds" in line]
