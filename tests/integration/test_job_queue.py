"""The queue of a real cluster: a run makes room, comes back and computes the same bits; the queue is killed meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cluster_tasks.client.job_queue import Queue, QueueError, needs
from cluster_tasks.client.submit import Job
from cluster_tasks.identity import KnownDashboard, environment
from lab.local import ROOT, Cluster, command, render
from lab.waiting import wait_for

pytestmark = [pytest.mark.wide, pytest.mark.skipif(sys.platform != "linux", reason="the local cluster is for Linux")]

RULES = """ --queue '{"min_run": 3, "owners": {"ann": {"weight": 2, "quota": null}}}'"""
RUN = ("python", "-m", "trainer.train_sft", "--config", "trainer/recipes/demo-sft.yaml", "trainer.steps=150", "log.plot=false")

MODEL = "{model_type: qwen2, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 2}"
ELASTIC = (
    *("python", "-m", "trainer.train_ppo", f"model.init={MODEL}", "model.dtype=float32", "model.tokenizer=characters:0123456789s="),
    *("data.path=trainer.data.tasks:sort_digits", "data.args={rows: 500, length: 4, seed: 1}", "data.max_prompt_tokens=8"),
    *("reward.function=digits_share", "rollout.engine=hf", "rollout.max_new_tokens=5", "trainer.steps=60", "trainer.prompts_per_step=8"),
    *("trainer.eval_prompts=0", "placement.ranks=2", "placement.gpus_per_rank=0", "placement.threads=1", "log.plot=false"),
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = render(tmp_path_factory.mktemp("queue"), {"name": "laptop", "nodes": 1, "cpus": 3}, node_flags=RULES)
    done = made.local("up")
    assert done.returncode == 0, done.stdout + done.stderr
    yield made
    made.local("down", "--timeout", "20")


@pytest.fixture
def env(cluster: Cluster) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "FLOTILLA_"))}
    return kept | environment(cluster.root, cluster.url)


@pytest.fixture
def queue(cluster: Cluster, env: dict[str, str]) -> Queue:
    return Queue(KnownDashboard.of(cluster.url, env))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What jobs need of the project."""
    (tmp_path / "trainer").symlink_to(ROOT / "trainer")
    return tmp_path


def state(queue: Queue, name: str) -> str:
    return queue.job(name)["state"]


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines() if "loss" in json.loads(line)]


def services(cluster: Cluster) -> list[psutil.Process]:
    """Those of the queue."""
    return [each for each in cluster.processes() if any(word.endswith("/job_queue") for word in command(each))]


@pytest.mark.slow
def test_a_run_makes_room_and_comes_back_with_the_same_bits_though_the_queue_is_killed(
    cluster: Cluster, queue: Queue, env: dict[str, str], folder: Path
) -> None:
    run = Job("low", [*RUN, "run.name=low"], folder)
    queue.submit("test", run, {"owner": "ann", "priority": 10} | needs(run, None, None, None, None), env)
    wait_for("five steps of low", lambda: (queue.job("low")["step"] or 0) >= 5, 120)
    queue.submit(
        "test", Job("high", ["python", "-c", "import time; time.sleep(2)"]), {"priority": 90, "sizes": [{"cpus": 3}], "driver": True}, env
    )
    wait_for("low to pause", lambda: state(queue, "low") != "running", 120)
    [killed] = services(cluster)
    os.kill(killed.pid, signal.SIGKILL)
    wait_for("the queue's next process", lambda: any(each.pid != killed.pid for each in services(cluster)), 120)

    def ended() -> bool:
        try:
            return state(queue, "high") == state(queue, "low") == "succeeded"
        except (OSError, QueueError):  # it has just been started again
            return False

    wait_for("both to end", ended, 180)
    low = queue.job("low")
    assert (low["attempt"], low["pauses"]) == (2, 1)
    assert low["job"]["owner"] == "ann"
    assert any("makes room for high" in each["reason"] for each in low["decisions"])
    alone = cluster.job(*RUN, "run.name=alone", flags=("--working-dir", str(folder)))
    assert alone.returncode == 0, alone.stdout + alone.stderr
    assert losses(cluster.root / "runs/low") == losses(cluster.root / "runs/alone")


@pytest.mark.slow
def test_a_run_makes_room_by_fewer_ranks_and_goes_on_beside_the_newcomer(
    cluster: Cluster, queue: Queue, env: dict[str, str], folder: Path
) -> None:
    run = Job("elastic", [*ELASTIC, "run.name=elastic"], folder)
    sizes = needs(run, None, None, 1, 2)
    assert [size["cpus"] for size in sizes["sizes"]] == [3, 2]
    queue.submit("test", run, {"owner": "ann", "priority": 10} | sizes, env)
    wait_for("five steps of elastic", lambda: (queue.job("elastic")["step"] or 0) >= 5, 120)
    sleeps = Job("newcomer", ["python", "-c", "import time; time.sleep(600)"])
    queue.submit("test", sleeps, {"priority": 90, "sizes": [{"cpus": 1}], "driver": True}, env)
    wait_for("elastic to be back", lambda: queue.job("elastic")["attempt"] == 2 and state(queue, "elastic") == "running", 120)
    assert state(queue, "newcomer") == "running", "side by side"
    assert queue.job("elastic")["size"]["cpus"] == 2, "one rank and the engine"
    wait_for("elastic to end", lambda: state(queue, "elastic") == "succeeded", 180)
    queue.do("newcomer", "cancel")
    alone = cluster.job(*ELASTIC, "run.name=undisturbed", flags=("--working-dir", str(folder)))
    assert alone.returncode == 0, alone.stdout + alone.stderr
    found = losses(cluster.root / "runs/elastic")
    assert len(found) == 60, "every step once"
    assert found == pytest.approx(losses(cluster.root / "runs/undisturbed"), rel=1e-2, abs=1e-4)


def test_what_can_never_run_is_refused_before_it_is_uploaded_twice(queue: Queue, env: dict[str, str], folder: Path) -> None:
    wait_for("the queue to see the cluster", lambda: queue.all()["cluster"].get("cpus") == 3, 60)
    job = Job("huge", ["python", "-c", "1"], folder)
    with pytest.raises(QueueError, match="takes at least 64 CPUs, and the cluster has 3: it would never start"):
        queue.submit("test", job, {"sizes": [{"cpus": 64}]}, env)
    with pytest.raises(QueueError, match="priority: 101"):
        queue.submit("test", job, {"sizes": [{"cpus": 1}], "priority": 101}, env)
    with pytest.raises(QueueError, match="nope: the queue has no such job"):
        queue.job("nope")


def test_a_job_that_fails_says_its_last_words_and_one_is_held_and_released(queue: Queue, env: dict[str, str]) -> None:
    wrong = Job("wrong", ["python", "-c", "import sys; sys.exit('no such thing')"])
    queue.submit("test", wrong, {"sizes": [{"cpus": 1}], "driver": True}, env)
    wait_for("wrong to fail", lambda: state(queue, "wrong") == "failed", 60)
    assert queue.job("wrong")["reason"] == "exit code 1: no such thing"
    sleeps = Job("sleeps", ["python", "-c", "import time; time.sleep(600)"])
    queue.submit("test", sleeps, {"sizes": [{"cpus": 1}], "driver": True}, env)
    wait_for("sleeps to run", lambda: state(queue, "sleeps") == "running", 120)
    time.sleep(2)
    assert queue.do("sleeps", "hold")["state"] == "pausing"
    wait_for("sleeps to be held", lambda: state(queue, "sleeps") == "held", 60)
    assert queue.do("sleeps", "cancel")["state"] == "cancelled"
    assert queue.plan()["jobs"].get("sleeps") is None


def test_a_new_head_goes_on_with_the_queue_of_one_that_was_killed(
    cluster: Cluster, queue: Queue, env: dict[str, str], folder: Path
) -> None:
    """Every process at once, as when the machine loses power."""
    run = Job("survivor", [*RUN, "run.name=survivor", "trainer.checkpoint_every=10"], folder)
    queue.submit("test", run, {"owner": "ann", "priority": 10} | needs(run, None, None, None, None), env)
    waits = Job("waits", ["python", "-c", "1"])
    queue.submit("test", waits, {"priority": 1, "sizes": [{"cpus": 3}], "driver": True}, env)
    wait_for("a checkpoint of survivor", lambda: (queue.job("survivor")["step"] or 0) >= 20, 120)
    for process in cluster.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    up = cluster.local("up")
    assert up.returncode == 0, up.stdout + up.stderr

    def ended() -> bool:
        try:
            return state(queue, "survivor") == state(queue, "waits") == "succeeded"
        except (OSError, QueueError):  # the head has just begun
            return False

    wait_for("both to end", ended, 240)
    assert queue.job("survivor")["attempt"] == 2
    alone = cluster.job(*RUN, "run.name=unkilled", "trainer.checkpoint_every=10", flags=("--working-dir", str(folder)))
    assert alone.returncode == 0, alone.stdout + alone.stderr
    assert losses(cluster.root / "runs/survivor") == losses(cluster.root / "runs/unkilled")


@pytest.mark.slow
def test_ten_runs_of_a_trace_on_two_nodes_learn_what_they_do_alone(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, folder: Path
) -> None:
    """Three CPUs for ten runs that come within a minute: the later are the dearer, so that the earlier are paused for them."""
    made, draw = render(tmp_path_factory.mktemp("two"), {"name": "laptop", "nodes": 2, "cpus": 2}, node_flags=RULES), random.Random(3)
    up = made.local("up")
    assert up.returncode == 0, up.stdout + up.stderr
    try:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "FLOTILLA_"))}
        env = kept | environment(made.root, made.url)
        queue = Queue(KnownDashboard.of(made.url, env))
        runs = {f"run-{i}": [*RUN, f"run.seed={i}"] for i in range(10)}
        for i, (name, words) in enumerate(runs.items()):
            job = Job(name, [*words, f"run.name={name}"], folder)
            queue.submit("test", job, {"owner": f"owner-{i % 3}", "priority": 10 * i} | needs(job, None, None, None, None), env)
            time.sleep(draw.uniform(1, 8))
        wait_for("ten runs to end", lambda: {state(queue, name) for name in runs} == {"succeeded"}, 900)
        pauses = {name: queue.job(name)["pauses"] for name in runs}
        assert sum(pauses.values()) >= 3, pauses
        for name, words in runs.items():
            alone = subprocess.run(
                [sys.executable, *words[1:], f"run.name={name}-alone"],
                cwd=ROOT,
                env=kept | {"FLOTILLA_RUNS": str(made.root / "alone")},
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            assert alone.returncode == 0, alone.stdout + alone.stderr
            assert losses(made.root / "runs" / name) == losses(made.root / "alone" / f"{name}-alone"), (name, pauses)
    finally:
        made.local("down", "--timeout", "20")
