"""rollout.elastic on real Ray nodes: engines come, are killed and are drained mid-run, and every prompt is learned from once."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue]
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2
from support import recorded
from support.configs import settings
from support.ray_actors import stop_process

from lab.waiting import wait_for
from trainer import train_ppo
from trainer.chat.tokenizer import load_tokenizer
from trainer.configs.ppo import PpoConfig
from trainer.data.loader import hold_out
from trainer.data.prompts import load_prompts
from trainer.data.tasks import sort_digits
from trainer.episodes import Episode, Prompt, Turn
from trainer.errors import STOPPED
from trainer.metrics import read
from trainer.online import elastic
from trainer.rewards.model import reward_model
from trainer.rewards.terms import Mistake
from trainer.rollout import slow

LABELS = {"flotilla.role": "rollout", "flotilla.fleet": "spot"}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    os.environ["RAY_AUTH_MODE"] = "disabled"
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False}, shutdown_at_exit=False)
    folder = str(Path(__file__).parents[1])  # has a person's environment
    ray.init(address=nodes.address, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": folder}})
    yield nodes
    ray.shutdown()
    nodes.shutdown()


def run(path: Path, rows: int, **changes: Any) -> PpoConfig:
    """One pass over so many rows, of answers that are long for so small a model; it writes down every prompt that it learns from."""
    rollout = {"mode": "async", "elastic": True, "max_sequences": 8, "max_new_tokens": 40} | changes.pop("rollout", {})
    trainer = {"steps": rows // 8 - 2, "micro_batch_tokens": 512, "export_every": None, "checkpoint_every": 1000}
    data = {"args": {"rows": rows, "length": 6}}
    log = {"tensorboard": False, "plot": False, "episodes": 32}
    return settings(path, rollout=rollout, trainer=trainer, data=data, log=log, **changes)


def learned_once(config: PpoConfig, folder: Path) -> None:
    prompts, _ = hold_out(config.data, load_prompts(config.data, load_tokenizer(config.model)).prompts, config.trainer.eval_prompts)
    assert Counter(row["prompt"] for row in recorded.groups(folder)) == Counter(prompt.row["prompt"] for prompt in prompts)
    ages = [f"staleness/{age}" for age in range(3)]
    rows = read(folder)[1:]
    assert all(sum(row[age] for age in ages) == pytest.approx(1) for row in rows), "no token is older than that"


class Script:
    """Acts while a run trains; what it raised is raised at its end, and a run that waits for it ends then too."""

    def __init__(self, act: Any):
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, args=(act,), daemon=True)
        self.thread.start()

    def _run(self, act: Any) -> None:
        try:
            act()
        except BaseException as error:
            self.error = error
            os.kill(os.getpid(), signal.SIGTERM)  # asks the run to stop

    def end(self) -> None:
        if self.error:
            raise self.error
        assert not self.thread.is_alive(), "the run was over first"


def serving(folder: Path) -> dict[str, dict[str, Any]]:
    """Engines that come and go and have answered, by name."""
    file = folder / elastic.FILE
    rows = json.loads(file.read_text())["engines"] if file.exists() else []
    return {row["name"]: row for row in rows if row["node"] and row["tokens_per_second"] > 0}


@pytest.fixture(autouse=True)
def written_often(monkeypatch) -> None:
    monkeypatch.setattr(elastic, "WRITE", 0.5)


@pytest.mark.slow  # test_local_elastic.py has as much of it in every run
def test_an_engine_joins_mid_run_serves_and_is_drained(tiny_model, tmp_path, cluster, capfd):
    config = run(tiny_model, 1200)

    def act() -> None:
        metrics = tmp_path / "metrics.jsonl"
        wait_for("the first steps", lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 3, 120)
        node = cluster.add_node(num_cpus=1, labels=LABELS)
        wait_for("an engine that came", lambda: serving(tmp_path), 120)
        [(name, row)] = serving(tmp_path).items()
        assert row["fleet"] == "spot" and row["version"] > 2
        gcs = GcsClient(address=cluster.address)
        reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")  # type: ignore[attr-defined]
        assert gcs.drain_node(node.node_id, reason, "it is taken", (time.time_ns() // 1_000_000) + 60_000)[0]
        wait_for("its end", lambda: name not in json.loads((tmp_path / elastic.FILE).read_text())["engines"], 50)

    script = Script(act)
    code = train_ppo.train(config, tmp_path)
    script.end()
    assert code == 0
    out = capfd.readouterr().out
    assert "elastic-" in out and "leaves: its node is about to go" in out and "started again" not in out
    learned_once(config, tmp_path)
    rows = read(tmp_path)[1:]
    assert rows[0]["engines"] == 1 and max(row["engines"] for row in rows) == 2 and rows[-1]["engines"] == 1


@pytest.mark.slow
def test_an_engine_that_comes_and_is_killed_writes_turns_of_episodes(tiny_model, tmp_path, cluster, capfd):
    """Its turns are begun with its weights or older ones, and what it owed when it died is written by another engine."""
    environment = {"function": "support.environments:two_turns", "max_turns": 2}
    config = run(tiny_model, 20_000, environment=environment, reward={"function": "exact"})

    def act() -> None:
        metrics = tmp_path / "metrics.jsonl"
        wait_for("the first steps", lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 3, 120)
        node = cluster.add_node(num_cpus=1, labels=LABELS)
        wait_for("an engine that came", lambda: serving(tmp_path), 120)
        cluster.remove_node(node, allow_graceful=False)
        steps = len(metrics.read_text().splitlines())
        wait_for("ten steps without it", lambda: len(metrics.read_text().splitlines()) > steps + 10 and not serving(tmp_path), 60)
        os.kill(os.getpid(), signal.SIGTERM)

    script = Script(act)
    code = train_ppo.train(config, tmp_path)
    script.thread.join(10)
    script.end()
    assert code == STOPPED and "started again" not in capfd.readouterr().out
    rows = read(tmp_path)[1:]
    assert max(row["engines"] for row in rows) == 2 and all(row["turns"] == 2 for row in rows)
    assert all(sum(row[f"staleness/{age}"] for age in range(3)) == pytest.approx(1) for row in rows), "no token is older than that"
    learned = Counter(row["prompt"] for row in recorded.groups(tmp_path))
    assert learned <= Counter(row["prompt"] for row in sort_digits(**config.data.args)), "every prompt is learned from once at most"


@pytest.mark.slow
def test_a_reward_model_is_not_placed_on_a_node_that_may_go(cluster, monkeypatch):
    cluster.add_node(num_cpus=1, num_gpus=1, labels=LABELS)
    states, kill = [], ray.kill

    def seen(actor: Any) -> None:
        states.append(ray._private.state.actors(actor._actor_id.hex())["State"])  # type: ignore[attr-defined]
        kill(actor)

    monkeypatch.setattr(ray, "kill", seen)
    episode = Episode(Prompt(0, [1], {"prompt": "1"}), 0, [Turn([2], [0.0], "stop")], "2")
    with pytest.raises(Mistake, match=r"its model was not up within 6 s \(start_seconds\)"):
        asyncio.run(reward_model([episode], model="none", gpus=1, start_seconds=6))
    assert states == ["PENDING_CREATION"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rollout", "why"),
    [
        ({"slow": 4}, r"elastic-\d+ leaves: it did not answer for \d+ s \(rollout.slow\)"),
        ({"slow": None, "silence": 10}, r"elastic-\d+ leaves: it gave no sign of life for \d+ s \(rollout.silence\)"),
    ],
)
def test_an_engine_that_is_stopped_is_named_and_replaced_and_holds_nothing(tiny_model, tmp_path, cluster, capfd, monkeypatch, rollout, why):
    monkeypatch.setattr(slow, "LEAST", 2.0)
    config = run(tiny_model, 20_000, rollout=rollout)

    def act() -> None:
        metrics = tmp_path / "metrics.jsonl"
        cluster.add_node(num_cpus=1, labels=LABELS)
        wait_for("an engine that came", lambda: serving(tmp_path), 120)
        [name] = serving(tmp_path)
        stop_process(name)
        steps = len(metrics.read_text().splitlines())
        wait_for("another one", lambda: serving(tmp_path) and name not in serving(tmp_path), 120)
        assert len(metrics.read_text().splitlines()) > steps + 3
        os.kill(os.getpid(), signal.SIGTERM)

    script = Script(act)
    code = train_ppo.train(config, tmp_path)
    script.thread.join(10)
    script.end()
    assert code == STOPPED
    out = capfd.readouterr().out
    assert re.search(why, out) and "started again" not in out
    assert (" is slow: " in out) == bool(rollout["slow"])
    learned = Counter(row["prompt"] for row in recorded.groups(tmp_path))
    assert learned <= Counter(row["prompt"] for row in sort_digits(**config.data.args)), "every prompt is learned from once at most"
