"""Jobs on a real Slurm by the rendered scripts: Ray and torchrun on several nodes, their exit codes, and going on after a notice."""

from __future__ import annotations

import json
import re

import pytest

from lab.slurm.cluster import until
from lab.slurm.project import SETTINGS

pytestmark = pytest.mark.hosts

WHO = """
import ray, sys
ray.init()
print("NODES", sorted(node["NodeManagerAddress"] for node in ray.nodes()), sys.argv[1:])
raise SystemExit(3)
"""
SFT = [
    "-m",
    "trainer.train_sft",
    "--config",
    "trainer/recipes/demo-sft.yaml",
    "data.args={rows: 400, length: 4, seed: 1}",
    "trainer.prompts_per_step=16",
    "placement.threads=1",
    "trainer.checkpoint_every=1000",
    "log.tensorboard=false",
    "log.plot=false",
]


def steps(project, run: str) -> list[int]:
    """Of the metrics that a run has written."""
    file = project.folder / "runs" / run / "metrics.jsonl"
    return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []


def test_a_ray_job_on_two_nodes_gets_its_arguments_and_the_script_ends_with_its_code(projects, slurm):
    project = projects("two-nodes", slurm=SETTINGS["slurm"] | {"mail": "me@example.com"})
    job = project.submit("ray-ppo", "python", "-c", WHO, "it's", "two words")
    state, log = slurm.ended(job), project.log("ray-ppo", job)
    assert (state["JobState"], state["ExitCode"]) == ("FAILED", "3:0"), log
    assert "NODES ['10.77.0.1', '10.77.0.2'] [\"it's\", 'two words']" in log
    assert "ssh -N -L 8265:127.0.0.1:8265 -J me@login.example.com me@n1" in log
    assert (project.folder / "build/slurm/ray.token").read_text() not in log
    assert not (project.folder / "build/slurm/node/__pycache__").exists()  # which a container's root would own
    mails = slurm.folder / "log/mail"
    until(lambda: mails.exists() and "me@example.com" in mails.read_text(), 60, "the mail")
    assert f"Job_id={job} Name=ray-ppo Failed" in mails.read_text()


def test_torchrun_on_two_nodes_saves_at_slurms_notice_and_goes_on_after_the_queue(projects, slurm):
    project = projects("sft")
    job = project.submit("torchrun", *SFT, "run.name=sft", "trainer.steps=80")
    until(lambda: len(steps(project, "sft")) > 1, 120, "the first steps")
    slurm.run(f"scancel --batch --signal=USR1 {job}")  # as Slurm does before the time limit
    until(lambda: slurm.state(job)["Restarts"] == "1", 120, "the requeue")
    state, log = slurm.ended(job), project.log("torchrun", job)
    assert (state["JobState"], state["ExitCode"], state["Restarts"]) == ("COMPLETED", "0:0", "1"), log
    [saved] = set(re.findall(r"SIGUSR1: saved after step (\d+)", log))
    assert 1 < int(saved) < 80
    assert steps(project, "sft") == list(range(1, 81)), log  # none twice, none left out
    assert "back into the queue, time 1 of 10" in log
    assert (project.folder / "runs/sft/model/config.json").is_file()
