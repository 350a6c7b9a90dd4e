"""How soon a rollout engine that joins a run (rollout.elastic) answers, against the same engine started by itself.

A run trains in rollout.mode=async all the while, on the same cores, with one engine of its own. Bare: a process that imports the engine,
loads the model and answers one prompt, from the moment at which Ray has a new node. Joining: from the same moment until the run has its
first answer, before which the engine has taken the run's latest weights.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from benchmarks.report import Ratio, Report
from trainer import train_ppo
from trainer.cli import parse
from trainer.cluster import placement
from trainer.configs.ppo import PpoConfig
from trainer.metrics import FILE as METRICS
from trainer.online import elastic

ROUNDS = 3
LONGER = 1.2  # limit
NICE = 15  # of Ray's workers, by its setting worker_niceness: an engine by itself must not go before those of the run
SECONDS = 300  # a deadline of each wait
STAGES: dict[str, Callable[[dict[str, Any]], bool]] = {
    "is up": lambda row: True,
    "has weights": lambda row: row["version"] >= 0,
    "has answered": lambda row: row["tokens_per_second"] > 0,
}
BARE = f"""
import os, sys
os.nice({NICE})
from benchmarks.joining import bare
bare(sys.argv[1:])
"""


def settings(model: Path) -> list[str]:
    return [
        *("--config", "trainer/recipes/demo.yaml", f"model.path={model}", "run.name=joining", "data.args.rows=200000"),
        *("rollout.mode=async", "rollout.elastic=true", "rollout.max_sequences=64", "rollout.max_logprob_diff=null", "optim.lr=1e-5"),
        *("trainer.steps=100000", "trainer.checkpoint_every=100000", "trainer.eval_prompts=0", "placement.threads=1"),
        *("log.tensorboard=false", "log.plot=false"),
    ]


def config(words: list[str]) -> PpoConfig:
    return parse(words, prog="benchmarks.joining", model=PpoConfig)


def bare(words: list[str]) -> None:
    """The engine of a run by itself: it answers one prompt, and says so."""
    import importlib

    from trainer.cluster import actors
    from trainer.rollout import Sampling
    from trainer.rollout.engines import ENGINES

    given = config(words)
    actors.settle(placement.threads(given.placement, given.placement.cpus_per_engine))
    module, name = ENGINES[given.rollout.engine].split(":")
    engine = getattr(importlib.import_module(module), name)(given, given.model.path, 0)
    engine.ask(0, [1, 2, 3], Sampling(given.rollout.max_new_tokens, 1.0))
    while not engine.work(1.0):
        pass
    print("answered", flush=True)


def alone(nodes: Cluster, words: list[str]) -> float:
    """Seconds until an engine by itself has answered, on a node that has just come too: its own processes still start."""
    node = nodes.add_node(num_cpus=1)
    began = time.perf_counter()
    with subprocess.Popen([sys.executable, "-c", BARE, *words], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None, "it has a pipe"
        if not any(line.startswith("answered") for line in process.stdout):
            raise RuntimeError("an engine by itself did not answer")
        seconds = time.perf_counter() - began
        process.kill()
    nodes.remove_node(node)
    return seconds


def joined(nodes: Cluster, folder: Path) -> tuple[float, ...]:
    """Seconds until an engine on a node that came is up, has weights of the run, and has answered."""
    node = nodes.add_node(num_cpus=1, labels={placement.ROLE: placement.ELASTIC})
    began, seconds = time.perf_counter(), []
    for what, has in STAGES.items():
        until(lambda has=has: any(has(row) for row in guests(folder)), f"engine that joined and {what}")
        seconds.append(time.perf_counter() - began)
    nodes.remove_node(node)
    until(lambda: not guests(folder), "end of the engine that joined")
    return tuple(seconds)


def guests(folder: Path) -> list[dict[str, Any]]:
    """What the run says of engines that came."""
    file = folder / elastic.FILE
    rows = json.loads(file.read_text())["engines"] if file.exists() else []
    return [row for row in rows if row["name"].startswith("elastic-")]


def until(happened: Any, what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not happened():
        if time.monotonic() > deadline:
            raise RuntimeError(f"no {what} within {SECONDS} s")
        time.sleep(0.02)


class Rounds(threading.Thread):
    """Takes the times while a run trains, and ends it."""

    def __init__(self, nodes: Cluster, words: list[str], folder: Path):
        super().__init__(daemon=True)
        self.nodes, self.words, self.folder = nodes, words, folder
        self.alone: list[float] = []
        self.joined: list[tuple[float, ...]] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            metrics = self.folder / METRICS
            until(lambda: metrics.exists() and metrics.read_text().count("\n") > 3, "step of the run")
            for _ in range(ROUNDS):
                self.alone.append(alone(self.nodes, self.words))
                self.joined.append(joined(self.nodes, self.folder))
        except BaseException as error:
            self.error = error
        os.kill(os.getpid(), signal.SIGTERM)  # asks the run to stop


def shown(seconds: Iterable[float]) -> str:
    return ", ".join(f"{value:.1f} s" for value in seconds)


def run() -> Report:
    os.environ["RAY_AUTH_MODE"] = "disabled"
    elastic.WRITE = 0.0  # with every look: what is asked for here is when it first has answered
    with tempfile.TemporaryDirectory(prefix="flotilla-joining-") as runs:
        sft = [sys.executable, "-m", "trainer.train_sft", "--config", "trainer/recipes/demo-sft.yaml"]
        subprocess.run(sft, env=os.environ | {"FLOTILLA_RUNS": runs}, check=True)
        words, folder = settings(Path(runs) / "demo-sft/model"), Path(runs) / "joining"
        nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False}, shutdown_at_exit=False)
        ray.init(address=nodes.address, log_to_driver=False)
        try:
            rounds = Rounds(nodes, words, folder)
            rounds.start()
            train_ppo.train(config(words), folder)
            rounds.join(SECONDS)
        finally:
            ray.shutdown()
            nodes.shutdown()
    if rounds.error:
        raise rounds.error
    answered = [seconds[-1] for seconds in rounds.joined]
    ratio = statistics.median(answered) / statistics.median(rounds.alone)
    return Report(
        "joining",
        [Ratio("seconds until an engine that joins a run answers / started by itself, medians", ratio, LONGER)],
        {
            "by itself": shown(rounds.alone),
            **{f"joins and {what}": shown(each) for what, each in zip(STAGES, zip(*rounds.joined, strict=True), strict=True)},
        },
        {"joins": rounds.joined, "by itself": rounds.alone},
    )
