"""Seconds of the same GRPO run's steps on two nodes that Slurm started, that dstack started, and that are processes of this machine.

All three are the demo's recipe with one trainer rank and one sampler, a node each, and one thread each; in turns, so that a busy minute
meets all of them. Slurm and the dstack server with its hosts are those of tests/integration, on this machine's cores. Needs root.
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
from typing import TYPE_CHECKING

from benchmarks.report import Ratio, Report
from cluster_tasks.node.ports import free_port
from cluster_tasks.ray import NODE_AGENT

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))  # where the clusters are

if TYPE_CHECKING:
    from integration.dstack.lab import Lab
    from integration.slurm.project import Project

ROUNDS, STEPS, FIRST = 2, 18, 4  # steps before FIRST warm up
DEADLINE = 600  # seconds
LIMIT = 1.15  # where the nodes came from should not be seen in a step
SETTINGS = [f"trainer.steps={STEPS}", "trainer.eval_prompts=0", "trainer.checkpoint_every=1000", "rollout.engine=hf", "placement.threads=1"]
PPO = ["python", "-m", "trainer.train_ppo", "--config", "trainer/recipes/demo.yaml", *SETTINGS, "log.tensorboard=false", "log.plot=false"]
SFT = ["python", "-m", "trainer.train_sft", "--config", "trainer/recipes/demo-sft.yaml", "trainer.steps=20"]

Place = Callable[[str], Path]  # trains a run of this name; its folder


def run() -> Report:
    taken: dict[str, list[float]] = {"Slurm": [], "dstack": [], "this machine": []}
    with tempfile.TemporaryDirectory(prefix="places-") as folder, slurm(Path(folder)) as by_slurm, dstack() as by_dstack:
        places: dict[str, Place] = {"Slurm": by_slurm, "dstack": by_dstack, "this machine": local(Path(folder))}
        for round_ in range(ROUNDS):
            for name, train in places.items():
                taken[name] += step_seconds(train(f"round-{round_}"))
    seconds = {name: statistics.median(steps) for name, steps in taken.items()}
    here = seconds["this machine"]
    return Report(
        "places",
        [Ratio(f"step on nodes of {name} / on nodes of this machine", seconds[name] / here, LIMIT) for name in ("Slurm", "dstack")],
        {"seconds of a step": {name: round(value, 3) for name, value in seconds.items()}},
        taken,
    )


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[Place]:
    """`sbatch build/slurm/ray-ppo.sbatch` on two nodes."""
    from integration.slurm.cluster import Cluster, lacking
    from integration.slurm.project import Project

    if reason := lacking():
        raise SystemExit(f"python -m benchmarks places: {reason}")
    cluster = Cluster(folder / "shared").start()
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
def dstack() -> Iterator[Place]:
    """`dstack apply -f build/lab/ray-job.dstack.yml` on two hosts."""
    from integration.dstack.lab import Lab, lacking

    if reason := lacking():
        raise SystemExit(f"python -m benchmarks places: {reason}")
    with Lab(hosts=2) as lab:
        lab.stack()
        lab.fleet()
        lab.must(f"FLOTILLA_RUNS={lab.shared} {' '.join(SFT)}")
        yield lambda name: by_dstack(lab, name)


def by_dstack(lab: Lab, name: str) -> Path:
    lab.stack(task={"job": {"command": " ".join([*PPO, f"run.name={name}"])}})
    lab.must(". build/lab/env.sh; dstack apply -y -d -f build/lab/ray-job.dstack.yml")
    lab.wait_run("ray-job", "done", timeout=DEADLINE)
    lab.wait_idle()
    return lab.shared / name


def local(folder: Path) -> Place:
    """Two of the node agents that `python -m cluster_tasks.local` would start."""
    runs = folder / "runs"
    must([sys.executable, *SFT[1:]], ROOT, runs)

    def train(name: str) -> Path:
        flags = ["--addresses", "127.0.0.2,127.0.0.3", "--port", str(free_port()), "--dashboard-port", str(free_port())]
        flags += ["--num-cpus", "1", "--object-store-mb", "80"]
        job = ["--job", " ".join([*PPO, f"run.name={name}"]), "--working-dir", "."]
        with tempfile.TemporaryDirectory(prefix="ray-") as temp:
            agent = [sys.executable, str(NODE_AGENT), *flags]
            worker = subprocess.Popen(
                [*agent, "--rank", "1", "--temp-dir", f"{temp}/1"],
                cwd=ROOT,
                env=environment(runs),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.STDOUT,
            )
            try:
                must([*agent, "--rank", "0", "--temp-dir", f"{temp}/0", *job], ROOT, runs)
            finally:
                worker.terminate()
                worker.wait(60)
        return runs / name

    return train


def must(command: list[str], folder: Path, runs: Path) -> None:
    done = subprocess.run(command, cwd=folder, env=environment(runs), capture_output=True, text=True, timeout=DEADLINE, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:4])} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")


def environment(runs: Path) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SLURM_", "FLOTILLA_"))}
    return inherited | {"FLOTILLA_RUNS": str(runs), "PATH": f"{Path(sys.executable).parent}:{inherited['PATH']}"}


def step_seconds(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["seconds"] for line in lines if line.get("step", 0) >= FIRST and "seconds" in line]
