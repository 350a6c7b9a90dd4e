"""A bad machine is taken out and replaced, on a real dstack server, while a training run that samples on it goes on."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from support import recorded

from lab.dstack.hosts import NETWORK
from lab.dstack.lab import Lab
from lab.waiting import wait_for
from trainer.data.tasks import sort_digits
from trainer.metrics import read

pytestmark = pytest.mark.hosts
DATA = {"rows": 50000, "length": 8, "seed": 2}  # more than are learned from while the test runs
SFT = "python -m trainer.train_sft --config trainer/recipes/demo-sft.yaml trainer.steps=20 trainer.checkpoint_every=20"
# A rank and a rollout engine on the first host, and an engine on each node of `spot`.
GRPO = (
    "python -m trainer.train_ppo --config trainer/recipes/demo.yaml run.name=grpo rollout.engine=hf rollout.mode=async "
    "rollout.elastic=true rollout.max_logprob_diff=null rollout.max_sequences=16 algorithm.group_size=4 trainer.prompts_per_step=32 "
    "trainer.eval_prompts=16 data.args.rows=50000 trainer.steps=100000 placement.threads=1 log.episodes=128 "
    "log.tensorboard=false"
)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """Three hosts: the cluster on the first, an elastic fleet on the others, of which one is spare."""
    with Lab(hosts=3, first=31) as lab:
        ssh = {"user": "root", "identity_file": str(lab.folder / "key"), "network": f"{NETWORK}.0/24"}
        hosts = [{"hostname": host.address} for host in lab.hosts]
        machine = {"cpus": 1, "memory": "1GB..", "disk": "100MB.."}
        first = machine | {"name": "lab", "cpus": 2, "ssh": ssh | {"hosts": hosts[:1]}}
        others = machine | {"name": "spot", "role": "rollout", "nodes": "0..2", "ssh": ssh | {"hosts": hosts[1:]}}
        lab.stack(fleets=[first, others])
        lab.must(f"FLOTILLA_RUNS={lab.shared} {SFT}")
        yield lab


def machines(lab: Lab) -> list[dict[str, Any]]:
    return json.loads(lab.user("python -m cli node list lab --json 2>/dev/null").stdout)


def rows(lab: Lab) -> list[dict[str, Any]]:
    """The metrics of each step that the run has learned."""
    file = lab.shared / "grpo/metrics.jsonl"
    return [row for row in read(lab.shared / "grpo") if "engines" in row] if file.exists() else []


def wait_for_engines(lab: Lab, count: int, what: str) -> int:
    """Until the last step had so many rollout engines; that step."""
    wait_for(what, lambda: bool(found := rows(lab)) and found[-1]["engines"] == count, 240, 1)
    return rows(lab)[-1]["step"]


@pytest.mark.slow
def test_a_bad_node_is_replaced_by_another_machine_and_training_goes_on(lab: Lab):
    done = lab.user("python -m cli up lab", timeout=600)
    assert done.returncode == 0, done.stdout
    try:
        submit = "exec ray job submit --submission-id train --runtime-env build/lab/runtime-env.yaml --working-dir . --"
        job = lab.start(f". build/lab/env.sh && {submit} {GRPO}", "job.log")
        lab.must("python -m cli scale lab spot=1")
        wait_for("its node", lambda: any(each["run"] == "ray-spot-0" for each in machines(lab)), 240, 1)
        lab.wait_run("ray-spot-0", "running")
        [bad] = [each for each in machines(lab) if each["run"] == "ray-spot-0"]
        before = wait_for_engines(lab, 2, "an engine on it that serves")

        listed = lab.user("python -m cli node list lab --events").stdout
        assert listed.count("Instance ") >= 2 and "healthy" in listed, listed
        wrong = lab.user(f"python -m cli node replace lab {bad['host']}0")
        assert wrong.returncode == 2 and f"{bad['host']}0' is no machine of this stack; did you mean {bad['host']}?" in wrong.stdout
        [head] = [each for each in machines(lab) if each["run"] == "ray"]
        refused = lab.user(f"python -m cli node replace lab {head['name']}")
        assert refused.returncode == 2 and "is node 0 of the cluster ray, whose nodes start and end together: --restart" in refused.stdout

        said = lab.must(f"python -m cli node replace lab {bad['host']}", timeout=600)
        assert f"$ dstack fleet delete -y -i {bad['number']} spot" in said
        lab.wait_run("ray-spot-0", "running")
        [new] = [each for each in machines(lab) if each["run"] == "ray-spot-0"]
        assert new["host"] != bad["host"] and bad["host"] not in [each["host"] for each in machines(lab)]
        wait_for("its engine to be forgotten, or counted no more", lambda: rows(lab)[-1]["step"] > before + 1, 240, 1)
        served = wait_for_engines(lab, 2, "an engine on the new machine that serves")
        wait_for("steps with it", lambda: rows(lab)[-1]["step"] > served + 3, 240, 1)
        assert job.poll() is None and lab.status("ray") == "running"
        lab.must("python -m cli down lab --job train")
        job.wait(240)
        steps = [row["step"] for row in rows(lab)]
        assert steps == list(range(1, len(steps) + 1)) and 1 in {row["engines"] for row in rows(lab)[before:served]}
        given, learned = (Counter(row["prompt"] for row in rows) for rows in (sort_digits(**DATA), recorded.read(lab.shared / "grpo")))
        assert all(count % 4 == 0 and count <= 4 * given[prompt] for prompt, count in learned.items()), "no group is learned from twice"
    finally:
        lab.user("python -m cli down lab", timeout=300)
