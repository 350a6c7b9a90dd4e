"""Prometheus on a real cluster of two nodes: every target up, the rules its own, and an alert that reaches a receiver."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster_tasks.node.monitoring import grafana
from cluster_tasks.node.monitoring.programs import DATASOURCE
from cluster_tasks.node.ports import free_port
from cluster_tasks.node.settings import read_settings
from lab.local import PROJECT, Cluster, command, render
from lab.waiting import wait_for

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.skipif(sys.platform != "linux" or not shutil.which("prometheus"), reason="needs Linux and Debian's prometheus"),
]

FLEET = {"name": "laptop", "nodes": 2, "cpus": 1}
SECRET = "canary-7c1d"
PPO = """
import ray, tempfile, time
from trainer.metrics.gauges import gauges
from trainer.metrics import Metrics
ray.init()
folder = tempfile.mkdtemp() + "/ppo"
with Metrics(folder, total=3, sinks=[gauges("ppo")]) as metrics:
    for step in (1, 2, 3):
        metrics.log(step, {"reward": 0.5, "loss": 0.1, "kl": 0.01, "tokens_per_second": 100.0, "seconds": 1.0})
        metrics.log(step, {"eval_reward": 0.5})
    time.sleep(1000)
"""
SFT = ["run.name=sft", "trainer.steps=100000", "trainer.checkpoint_every=100000", "data.args={rows: 400, length: 4, seed: 1}"]
VLLM = """
import asyncio, os, sys, time
import ray, torch
ray.init()
torch.set_num_threads(1)
from trainer.configs.ppo import PpoConfig
from trainer.episodes import Prompt
from trainer.rollout import Sampling, sample
from trainer.rollout.vllm import VllmEngine
config = PpoConfig.model_validate({
    "run": {"name": "answers"}, "model": {"path": sys.argv[1], "dtype": "float32"}, "data": {"path": "a:b", "max_prompt_tokens": 16},
    "rollout": {"engine": "vllm", "max_new_tokens": 12}, "placement": {"gpus_per_rank": 0, "threads": 1},
})
engine = VllmEngine(config, sys.argv[1], 0)
while True:
    found = asyncio.run(sample(engine, [Prompt(0, [3, 4, 5], {})], [0], Sampling(12, samples=4), 0))
    print(sum(len(each.response_ids) for each in found), flush=True)
    time.sleep(3)
"""
# There is no GPU here, nor an exporter of one.
OF_GPUS = ("ray_node_gpus_utilization", "ray_node_gram_used", "flotilla_gpu_idle_share", "DCGM_", "gpu_")


class Receiver(ThreadingHTTPServer):
    """Keeps what is posted to it."""

    def __init__(self) -> None:
        self.got: list[tuple[str, Any]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                server.got.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def alerts(self) -> list[dict[str, Any]]:
        return [alert for _, content in self.got for alert in content["alerts"]]


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with Receiver() as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


@pytest.fixture(scope="module")
def ports() -> tuple[int, int]:
    return free_port(), free_port()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, receiver: Receiver, ports: tuple[int, int]) -> Iterator[Cluster]:
    os.environ["TEST_ALERT_URL"] = f"http://127.0.0.1:{receiver.server_address[1]}/{SECRET}"
    # Every disk is fuller than 1 %.
    known = {"enabled": True, "prometheus_port": ports[0], "grafana_port": ports[1], "price": 3.5}
    known["alerts"] = {"webhook": "TEST_ALERT_URL", "full_disk": 1}
    made = render(tmp_path_factory.mktemp("monitoring"), FLEET, monitoring=known)
    done = made.local("up", "--timeout", "240")
    assert done.returncode == 0, done.stdout + done.stderr
    yield made
    processes = made.processes()
    made.local("down", "--timeout", "20")
    assert not psutil.wait_procs(processes, timeout=120)[1], "Prometheus ends with its cluster"


def ask(port: int, path: str) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/{path}", timeout=60) as answer:
        return json.load(answer)["data"]


def query(port: int, text: str) -> list[Any]:
    return ask(port, f"query?query={urllib.parse.quote(text)}")["result"]


def test_every_target_of_ray_is_up(cluster: Cluster, ports: tuple[int, int]) -> None:
    def all_up() -> bool:
        found = ask(ports[0], "targets")["activeTargets"]
        nodes = {each["discoveredLabels"]["__address__"].rpartition(":")[0] for each in found if each["labels"]["job"] == "ray"}
        return {"127.0.0.2", "127.0.0.3"} <= nodes and all(each["health"] == "up" for each in found)

    wait_for("every target up", all_up, 300)


def test_prometheus_has_our_rules_and_counts_the_cost(cluster: Cluster, ports: tuple[int, int]) -> None:
    [group] = ask(ports[0], "rules")["groups"]
    assert {rule["name"] for rule in group["rules"]} >= {"IdleGpu", "SilentTrainer", "FullDisk", "NodeSilent", "flotilla_cost_usd"}
    [cost] = wait_for("the cost", lambda: query(ports[0], "flotilla_cost_usd"), 300)
    assert 0 < float(cost["value"][1]) < 7  # two nodes at 3.50 an hour each, for less than an hour


def test_an_alert_is_posted_once_and_its_url_is_in_no_file_or_command(cluster: Cluster, receiver: Receiver) -> None:
    wait_for("the alert", lambda: any(alert["labels"]["alertname"] == "FullDisk" for alert in receiver.alerts), 400)
    [alert, *_] = [alert for alert in receiver.alerts if alert["labels"]["alertname"] == "FullDisk"]
    assert alert["status"] == "firing" and "is full to" in alert["annotations"]["summary"]
    assert {path for path, _ in receiver.got} == {f"/{SECRET}"}
    assert not [process for process in cluster.processes() if SECRET in " ".join(command(process))]
    [prometheus] = [words for words in map(command, cluster.processes()) if words[0].endswith("prometheus")]
    [flag] = [word for word in prometheus if word.startswith("--config.file=")]
    for place in (Path(flag.partition("=")[2]).parent, cluster.root):
        assert not [file for file in place.rglob("*") if file.is_file() and SECRET.encode() in file.read_bytes()]


def test_grafana_would_find_rays_own_dashboards_and_their_datasource(cluster: Cluster, ports: tuple[int, int]) -> None:
    [prometheus] = [words for words in map(command, cluster.processes()) if words[0].endswith("prometheus")]
    [flag] = [word for word in prometheus if word.startswith("--config.file=")]
    found = read_settings(["--rank", "0", "--addresses", "a", "--temp-dir", str(Path(flag.partition("=")[2]).parents[2])], {})
    [_, ray] = grafana.providers(found, Path())["providers"]
    boards = [json.loads(file.read_text()) for file in sorted(Path(ray["options"]["path"]).glob("*.json"))]
    assert {"rayDefaultDashboard"} <= {board["uid"] for board in boards}
    for board in boards:
        [source] = [variable for variable in board["templating"]["list"] if variable["type"] == "datasource"]
        assert source["query"] == "prometheus" and source["current"].get("value", DATASOURCE) == DATASOURCE


@pytest.fixture(scope="module")
def jobs(cluster: Cluster, wide_model: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A trainer's metrics, supervised fine-tuning and a rollout engine; all run until the cluster ends."""
    recipe = ["env", f"FLOTILLA_RUNS={tmp_path_factory.mktemp('runs')}", "python", "-m", "trainer.train_sft"]
    for line in (
        ["python", "-c", PPO],
        [*recipe, "--config", "trainer/recipes/demo-sft.yaml", *SFT],
        ["python", "-c", VLLM, str(wide_model)],
    ):
        done = cluster.job(*line, flags=("--no-wait", *PROJECT))
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.usefixtures("cluster", "jobs")
def test_steps_of_every_trainer_are_in_prometheus(ports: tuple[int, int]) -> None:
    [step] = wait_for("the step", lambda: query(ports[0], 'ray_trainer_step{run="ppo"}'), 400)
    assert float(step["value"][1]) == 3
    names = ("step", "loss", "tokens_per_second", "step_seconds", "cost_usd", "cost_usd_per_1000_steps")
    text = f'{{__name__=~"ray_trainer_({"|".join(names)})", run="sft"}}'

    def all_of_them() -> list[Any]:
        each = query(ports[0], text)
        return each if len(each) == len(names) else []

    found = wait_for("all of supervised fine-tuning", all_of_them, 400)
    assert all(float(each["value"][1]) > 0 for each in found), found


@pytest.mark.usefixtures("cluster", "jobs")
@pytest.mark.parametrize("board", grafana.PANELS)
def test_every_panel_has_something_to_show(board: str, ports: tuple[int, int]) -> None:
    asked = [expr for _, _, queries in grafana.PANELS[board] for expr, _ in queries if not any(name in expr for name in OF_GPUS)]
    assert asked or board == "GPUs"
    for expr in asked:
        found = wait_for(expr, lambda expr=expr: query(ports[0], expr), 400)
        assert all(math.isfinite(float(each["value"][1])) for each in found), found


def test_a_second_monitoring_on_the_port_is_one_clear_error(
    cluster: Cluster, ports: tuple[int, int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    known = {"enabled": True, "prometheus_port": ports[0], "grafana_port": ports[1]}
    made = render(tmp_path_factory.mktemp("second"), {"name": "laptop", "nodes": 1, "cpus": 1}, monitoring=known)
    done = made.local("up")
    made.local("down")
    said = done.stdout + done.stderr
    assert done.returncode != 0 and f"port {ports[0]} is in use on this node" in said, said
    assert "flotilla:monitoring.prometheus_port" in said
