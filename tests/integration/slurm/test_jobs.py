"""Jobs on a real Slurm by the rendered scripts: Ray and torchrun on several nodes, their exit codes, and going on after a notice."""

from __future__ import annotations

import json
import re

import pytest

from lab.slurm.project import SETTINGS
from lab.waiting import wait_for

pytestmark = pytest.mark.hosts

WEB = {"command": "exec python -m http.server --bind $FLOTILLA_NODE_IP 8123", "port": 8123, "health": "/"}
WHO = """
import os, ray, sys, urllib.request
ray.init()
print("SERVICE", urllib.request.urlopen(os.environ["FLOTILLA_SERVICE_WEB"]).status, os.environ["FLOTILLA_SERVICE_WEB_ALL"])
print("NODES", sorted(node["NodeManagerAddress"] for node in ray.nodes()), sys.argv[1:])
raise SystemExit(3)
"""
# Fine-tuning whose first attempt waits after step 5 until it is asked to stop: a quick machine would be through its steps before.
HELD = """
import os, runpy, time
from trainer.metrics import Metrics
from trainer.cluster.stopping import Stopping
made, log, init = [], Metrics.log, Stopping.__init__
def note(self):
    init(self)
    made.append(self)
def hold(self, step, numbers):
    log(self, step, numbers)
    while step == 5 and os.environ.get("SLURM_RESTART_COUNT", "0") == "0" and not any(made):
        time.sleep(0.05)
Stopping.__init__, Metrics.log = note, hold
runpy.run_module("trainer.train_sft", run_name="__main__")
"""
SFT = [
    "held.py",
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


def test_a_ray_job_on_two_nodes_gets_arguments_and_services_and_the_script_ends_with_its_code(projects, slurm):
    project = projects("two-nodes", slurm=SETTINGS["slurm"] | {"mail": "me@example.com"}, task={"services": {"web": WEB}, "burn_in": "1s"})
    job = project.submit("ray-ppo", "python", "-c", WHO, "it's", "two words")
    state, log = slurm.ended(job), project.log("ray-ppo", job)
    assert (state["JobState"], state["ExitCode"]) == ("FAILED", "3:0"), log
    assert log.count("burn-in: 1 x CPU, ") == 2
    assert "NODES ['10.77.0.1', '10.77.0.2'] [\"it's\", 'two words']" in log
    assert "SERVICE 200 http://10.77.0.1:8123,http://10.77.0.2:8123" in log
    assert "ssh -N -L 8265:127.0.0.1:8265 -J me@login.example.com me@n1" in log
    assert (project.folder / "build/slurm/ray.token").read_text() not in log
    assert not (project.folder / "build/slurm/node/__pycache__").exists()  # which a container's root would own
    mails = slurm.folder / "log/mail"
    wait_for("the mail", lambda: mails.exists() and "me@example.com" in mails.read_text(), 240)
    assert f"Job_id={job} Name=ray-ppo Failed" in mails.read_text()


def test_torchrun_on_two_nodes_saves_at_slurms_notice_and_goes_on_after_the_queue(projects, slurm):
    project = projects("sft")
    (project.folder / "held.py").write_text(HELD)
    job = project.submit("torchrun", *SFT, "run.name=sft", "trainer.steps=30")
    wait_for("step 5", lambda: len(steps(project, "sft")) == 5, 300)
    slurm.run(f"scancel --batch --signal=USR1 {job}")  # as Slurm does before the time limit
    wait_for("the requeue", lambda: slurm.state(job)["Restarts"] == "1", 300)
    state, log = slurm.ended(job), project.log("torchrun", job)
    assert (state["JobState"], state["ExitCode"], state["Restarts"]) == ("COMPLETED", "0:0", "1"), log
    assert set(re.findall(r"SIGUSR1: saved after step (\d+)", log)) == {"5"}
    assert steps(project, "sft") == list(range(1, 31)), log  # none twice, none left out
    assert "back into the queue, time 1 of 10" in log
    assert (project.folder / "runs/sft/model/config.json").is_file()


def test_a_head_whose_agent_is_killed_is_put_back_and_a_job_that_is_killed_is_not(projects, slurm):
    """kill -9 of either is 137 to Slurm."""
    project = projects("killed")
    agent = "^[^ ]*python3 -B .*build/slurm/nod[e]"  # neither the script nor srun, which have these words too
    kill_agent = f"[ ${{SLURM_RESTART_COUNT:-0}} != 0 ] || pkill -9 -f '{agent}'; kill -9 $$"
    job = project.submit("ray-ppo", "sh", "-c", kill_agent, options="--nodes=1")
    wait_for("the requeue", lambda: slurm.state(job)["Restarts"] == "1", 300)
    state, log = slurm.ended(job), project.log("ray-ppo", job)
    assert (state["JobState"], state["ExitCode"], state["Restarts"]) == ("FAILED", "137:0", "1"), log
    assert "back into the queue, time 1 of 10" in log and f"attempt 2 of job {job}" in log
