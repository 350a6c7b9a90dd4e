"""From a stack of hosts to a trained model with the commands that a person types, on a real dstack server and over two hosts."""

from __future__ import annotations

import json
import re
import subprocess

import pytest

from lab.dstack.hosts import HERE, interrupt
from lab.dstack.lab import Lab
from lab.waiting import wait_for

pytestmark = [pytest.mark.hosts, pytest.mark.usefixtures("tidy"), pytest.mark.timeout(2000)]

ENV = ". build/lab/env.sh"
APPLY = f"{ENV}; exec dstack apply -y -f build/lab/ray-cluster.dstack.yml"
APPLY_JOB = f"{ENV}; dstack apply -y -d -f build/lab/ray-job.dstack.yml"
SUBMIT = "ray job submit --runtime-env build/lab/runtime-env.yaml --working-dir . --"
# The demo recipe with the rollout engine that starts at once. One rank and one rollout engine need a CPU each, and each host offers one.
GRPO = (
    "python -m trainer.train_ppo --config trainer/recipes/demo.yaml rollout.engine=hf trainer.prompts_per_step=16 trainer.eval_prompts=32"
)
GRPO += " trainer.steps=100000 trainer.checkpoint_every=5"  # it runs until the test has seen enough, however quick the machine is


def steps(lab: Lab, run: str) -> int:
    """Steps that are done, by what the run writes on the volume."""
    file = lab.shared / run / "metrics.jsonl"
    return json.loads(file.read_text().splitlines()[-1])["step"] if file.exists() and file.stat().st_size else 0


def resumes(lab: Lab) -> int:
    """The step that the attempt which is being made resumes after, as its job reports it."""
    lab.wait_run("ray-job", "running", timeout=500)
    wait_for("where it resumes", lambda: re.search(r"step (\d+) of 100000", lab.logs("ray-job")), 300, 1)
    return int(re.findall(r"step (\d+) of 100000", lab.logs("ray-job"))[0])


def apply(lab: Lab) -> subprocess.Popen[bytes]:
    """As a person does it who waits for the agent's word before submitting."""
    lab.wait_free(8265)
    cluster = lab.start(APPLY, "apply.log")
    lab.wait_forwarded(8265, cluster)
    wait_for("the agent's word", lambda: "ready: 2 of 2 nodes" in (lab.folder / "apply.log").read_text(), 300)
    return cluster


@pytest.mark.slow
@pytest.mark.usefixtures("model")
def test_a_stopped_run_goes_on_where_it_was(lab: Lab):
    cluster = apply(lab)
    refused = lab.user("RAY_ADDRESS=http://localhost:8265 ray job list")
    assert refused.returncode != 0, "the job API wants the token"
    assert "Authentication" in refused.stdout
    endless = f"{ENV}; {SUBMIT} {GRPO} run.name=grpo"
    job = lab.start(endless, "job.log")
    wait_for("step 8", lambda: steps(lab, "grpo") >= 8, 300)
    lab.stop("ray")
    job.wait(240)
    cluster.wait(240)
    done = steps(lab, "grpo")
    assert (lab.shared / f"grpo/checkpoints/step_{done}").is_dir(), "the workers stay while the job saves"
    lab.wait_idle()

    cluster = apply(lab)
    again = lab.start(endless, "again.log")
    wait_for("more steps", lambda: steps(lab, "grpo") > done + 2, 300)
    # No step is done twice. The log comes later than what the run writes itself.
    wait_for("where it goes on", lambda: f"step {done} of 100000" in (lab.folder / "again.log").read_text(), 240)
    lab.stop("ray")
    cluster.wait(240)
    again.wait(240)


@pytest.mark.slow
@pytest.mark.usefixtures("model")
def test_a_job_goes_on_from_its_checkpoint_after_a_host_was_cut_off(lab: Lab):
    lab.stack(task={"job": {"command": f"{GRPO} run.name=lost", "retry": True}})
    lab.must(APPLY_JOB)
    wait_for("step 7", lambda: steps(lab, "lost") >= 7, 400)
    head, worker = lab.host("ray-job", 0), lab.host("ray-job", 1)
    worker.link(up=False)
    wait_for("the agents on both sides to end the run", lambda: not head.agents() and not worker.agents(), 180)
    worker.link(up=True)
    wait_for("a second attempt", lambda: lab.jobs("ray-job")[0]["submission"] == 2, 300, 1)
    resumed = resumes(lab)
    assert resumed > 0, "the second attempt found the checkpoint"
    wait_for("more steps", lambda: steps(lab, "lost") > resumed + 2, 300)
    # dstack ends the other node when it has seen one end: which of them it sees first is chance.
    first = [job["job_submissions"][0]["exit_status"] for job in lab.api("runs/get", run_name="ray-job")["jobs"]]
    assert 75 in first, "sooner than dstack would have ended it, and with a reason"


def test_a_job_that_fails_fails_the_run_with_its_code(lab: Lab):
    lab.stack(task={"job": {"command": "sh -c 'ls trainer/train_ppo.py && exit 7'"}})
    lab.must(APPLY_JOB)
    lab.wait_run("ray-job", "failed", timeout=400)
    assert lab.jobs("ray-job")[0]["exit_status"] == 7
    assert [job["submission"] for job in lab.jobs("ray-job")] == [1, 1]
    assert "trainer/train_ppo.py" in lab.must("dstack logs ray-job"), "the job has its files"
    lab.wait_idle()


@pytest.mark.slow
@pytest.mark.usefixtures("model")
def test_a_job_saves_when_a_spot_machine_is_taken_back(lab: Lab):
    job = {"command": f"{GRPO} run.name=spot trainer.checkpoint_every=100000", "retry": True}
    lab.stack(task={"job": job, "env": {"FLOTILLA_NODE_ARGS": "--spot imdsv2"}})
    lab.must(APPLY_JOB)
    wait_for("step 4", lambda: steps(lab, "spot") >= 4, 400)
    worker = lab.host("ray-job", 1)
    worker.sh("ip addr add 169.254.169.254/32 dev lo")
    notice = worker.start(str(HERE / "host/metadata"), cwd=lab.folder, environment=lab.environment, log=lab.folder / "metadata.log")
    wait_for("a second attempt", lambda: lab.jobs("ray-job")[0]["submission"] == 2, 300, 1)
    done = steps(lab, "spot")
    interrupt(notice)
    worker.sh("ip addr del 169.254.169.254/32 dev lo")
    assert resumes(lab) == done, "nothing was lost, though no checkpoint was due"
