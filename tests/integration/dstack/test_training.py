"""From a stack of hosts to a trained model with the commands that a person types, on a real dstack server and over two hosts."""

from __future__ import annotations

import json

from integration.dstack.hosts import interrupt, wait_for
from integration.dstack.lab import Lab

ENV = ". build/lab/env.sh"
APPLY = f"{ENV}; exec dstack apply -y -f build/lab/ray-cluster.dstack.yml"
SUBMIT = "ray job submit --runtime-env build/lab/runtime-env.yaml --working-dir . --"
SFT = "python -m trainer.train_sft --config trainer/recipes/demo-sft.yaml trainer.steps=40 trainer.checkpoint_every=40"
# The demo recipe, with the sampler that starts at once; one rank and one sampler, which need a CPU each, and each host offers one.
GRPO = "python -m trainer.train_ppo --config trainer/recipes/demo.yaml rollout.engine=hf run.name=grpo"
SMALL = "trainer.prompts_per_step=16 trainer.eval_prompts=32 trainer.steps=400 trainer.checkpoint_every=5"


def rows(lab: Lab, run: str) -> list[dict]:
    file = lab.shared / run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_a_run_is_stopped_and_goes_on_where_it_saved(lab: Lab):
    cluster = lab.start(APPLY, "apply.log")
    lab.wait_forwarded(8265, cluster)
    refused = lab.user("RAY_ADDRESS=http://localhost:8265 ray job list")
    assert refused.returncode != 0, "the job API wants the token"
    assert "Authentication" in refused.stdout

    lab.must(f"{ENV}; {SUBMIT} {SFT}")
    job = lab.start(f"{ENV}; {SUBMIT} {GRPO} {SMALL}", "job.log")
    wait_for("step 8", lambda: len(rows(lab, "grpo")) > 8, 240)
    lab.stop("ray")
    assert interrupt(job) != 0
    interrupt(cluster)
    lab.wait_idle()
    print((lab.folder / "apply.log").read_text())
    print((lab.folder / "job.log").read_text())
    print(lab.logs("ray", 0), lab.logs("ray", 1))
    done = len(rows(lab, "grpo")) - 1
    print(done, list((lab.shared / "grpo").glob("*")))

    cluster = lab.start(APPLY, "apply.log")
    lab.wait_forwarded(8265, cluster)
    output = lab.must(f"{ENV}; {SUBMIT} {GRPO} {SMALL} trainer.steps={done + 10}")
    print(output)
    lab.stop("ray")
