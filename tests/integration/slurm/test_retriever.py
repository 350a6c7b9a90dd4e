"""A retriever on each of two nodes of a real Slurm, of which one is killed while a run trains: nothing of the run is lost."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from support import recorded

from lab.slurm.project import ROOT, SETTINGS
from lab.waiting import wait_for
from trainer.metrics import read

pytestmark = [pytest.mark.hosts, pytest.mark.slow]

STEPS, KILLED, GROUP, PROMPTS = 30, 4, 4, 8
# Every episode looks its question up, at its own node's retriever first: how else would a policy of random weights search?
LOOK_UP = """
from trainer.environments.search import addresses, retrieve
async def look_up(policy, row):
    nearest = addresses("")[0]
    [found] = await retrieve(addresses(""), [row["prompt"][:-1]], 1, 60)
    policy.metrics["second_node"] += "10.77.0.2" in nearest
    policy.metrics["found"] += row["prompt"][:-1] in found[0]["document"]["contents"].split()
    answer = await policy.generate()
    return len(set(answer.text)) / 10
"""
RUN = [
    *("--config", "trainer/recipes/demo-search.yaml", "run.name=search", "model.path=null"),
    "model.init={model_type: qwen2, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 2, "
    "num_key_value_heads: 2, max_position_embeddings: 256, tie_word_embeddings: true}",
    "model.tokenizer=characters:abcdefghijklmnopqrstuvwxyz0123456789<>/? ",
    *("environment.function=look_up:look_up", "environment.args={}", "environment.workers=2", "environment.max_turns=1"),
    *("environment.max_tokens=null", "rollout.max_new_tokens=8", f"algorithm.group_size={GROUP}", f"trainer.prompts_per_step={PROMPTS}"),
    *(f"trainer.steps={STEPS}", "trainer.eval_prompts=8", "placement.threads=1", "log.tensorboard=false", "log.plot=false"),
    f"log.episodes={GROUP * PROMPTS}",
]


def test_a_retriever_that_is_killed_on_one_of_two_nodes_costs_no_episode(projects: Any, slurm: Any) -> None:
    index = slurm.folder / "facts"
    build = [sys.executable, "-m", "retrieval.command", "build", "trainer.data.tasks:facts", "--out", str(index)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    serve = f"exec python {index}/serve.py --host $FLOTILLA_NODE_IP --port 8000"
    retriever = {"command": serve, "port": 8000, "on": "every", "health": "/health"}
    fleets = [SETTINGS["fleets"][0] | {"cpus": 2}]
    project = projects("retriever", fleets=fleets, task={"services": {"retriever": retriever}})
    (project.folder / "look_up.py").write_text(LOOK_UP)
    job = project.submit("ray-ppo", "python", "-m", "trainer.train_ppo", *RUN)
    run = project.folder / "runs/search"

    def learned() -> int:
        assert slurm.state(job)["JobState"] in ("PENDING", "RUNNING", "COMPLETING", "COMPLETED"), project.log("ray-ppo", job)
        return len((run / "metrics.jsonl").read_text().splitlines()) if (run / "metrics.jsonl").exists() else 0

    def serving() -> str:
        return slurm.on("n2", "pgrep -f '[s]erve.py.*10.77.0.2' | head -1", check=False).stdout.strip()

    wait_for("steps", lambda: learned() >= KILLED, 300, 0.2)
    before, at = serving(), learned()
    assert before
    slurm.on("n2", "pkill -9 -f '[s]erve.py.*10.77.0.2'")
    wait_for("the retriever to be started again", lambda: serving() not in ("", before), 120, 0.2)
    assert learned() > at, "meanwhile the other node's is asked"
    state, log = slurm.ended(job, 300), project.log("ray-ppo", job)
    assert state["JobState"] == "COMPLETED", log
    rows = [row for row in read(run) if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(row["environment/found"] == 1 and row.get("reward_failed", 0) == 0 for row in rows)
    assert all(0 < row["environment/second_node"] < 1 for row in rows), "episodes are played on both nodes"
    by_step = [row["step"] for row in recorded.read(run)]
    assert all(by_step.count(step) == GROUP * PROMPTS for step in range(1, STEPS + 1)), "no episode is missing"
