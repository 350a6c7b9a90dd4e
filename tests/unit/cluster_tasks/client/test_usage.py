"""What `flotilla top` and status show: read from a dashboard's answers, on a real port."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from cli import top
from cluster_tasks.client.usage import Progress, look, of_run, per_1000_steps, price_of, progress
from cluster_tasks.node.dashboard import Dashboard
from stacks.schema import Stack
from trainer.metrics import Metrics

NOW = 1_800_000_000.0
HOUR = 3600.0
STACK = Stack.model_validate({"name": "lab", "cloud": "local", "fleets": [{"name": "laptop", "nodes": 2}], "monitoring": {"price": 20}})


def node(address: str, head: bool = False, state: str = "ALIVE", **known: Any) -> dict[str, Any]:
    raylet = {
        "nodeManagerAddress": address,
        "state": state,
        "resourcesTotal": {"CPU": 8.0},
        "startTimeMs": str(int((NOW - 2 * HOUR) * 1000)),
    }
    return {"cpu": 50.0, "mem": [64 * 2**30, 32 * 2**30, 50.0, 32 * 2**30], "raylet": raylet | {"isHeadNode": head}} | known


def gpu(percent: int | None) -> dict[str, Any]:
    return {"name": "H100", "utilizationGpu": percent, "memoryUsed": 40 * 1024, "memoryTotal": 80 * 1024}


def job(name: str, status: str, began: float, ended: float | None = None) -> dict[str, Any]:
    times = {"start_time": began * 1000, "end_time": ended and ended * 1000}
    return {"submission_id": name, "status": status, "entrypoint": "python train.py", "driver_node_id": "abc", **times}


NODES = [
    node("10.0.0.2", gpus=[gpu(20), gpu(None)]),
    node("10.0.0.1", head=True, gpus=[gpu(100)]),
    node("10.0.0.3", state="DEAD"),
    {"raylet": {"nodeManagerAddress": "10.0.0.4", "state": "ALIVE"}},  # it has just come
]
JOBS = [
    job("grpo", "RUNNING", NOW - HOUR),
    job("sft", "SUCCEEDED", NOW - 2 * HOUR, NOW - 1.5 * HOUR),
    {"submission_id": None, "status": "RUNNING"},
    job("flotilla-debug-1", "RUNNING", NOW) | {"metadata": {"flotilla": "debug"}},
]


@contextmanager
def dashboard(answers: dict[str, Any]) -> Iterator[Dashboard]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path if self.path in answers else self.path.partition("?")[0]
            self.send_response(200 if path in answers else 404)
            self.end_headers()
            if path in answers:
                self.wfile.write(answers[path] if isinstance(answers[path], bytes) else json.dumps(answers[path]).encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Dashboard(f"http://127.0.0.1:{server.server_address[1]}", None)
        server.shutdown()


def printed_by_the_trainer(folder: Path) -> str:
    text = io.StringIO()
    with Metrics(folder, total=100, console=Console(file=text, soft_wrap=True, highlight=False)) as metrics:
        metrics.log(1, {"reward": 0.25, "loss": -0.01, "tokens_per_second": 900.0, "seconds": 2.0})
        metrics.log(2, {"reward": 0.5, "loss": -0.01, "kl": 0.0, "tokens_per_second": 8450.0, "seconds": 1.8})
    return text.getvalue()


def test_the_last_step_is_read_as_the_trainer_prints_it(tmp_path: Path) -> None:
    assert progress(printed_by_the_trainer(tmp_path)) == Progress(2, 100, 0.5, 8450.0, 1.8)
    assert progress("step 3/9  loss 1.5e-05  1,234,567 tokens/s  0.80 s  1:02 left") == Progress(3, 9, None, 1234567.0, 0.8)
    assert progress("step 4/90  1,234 tokens/s  0.80 s  eval reward 0.5  eval reward/gsm 0.25  1:00 left") == Progress(
        4, 90, None, 1234.0, 0.8
    )
    assert progress("step  4/90  eval reward     0.25      1,234 tokens/s     0.80 s") == Progress(4, 90, None, 1234.0, 0.8)
    assert progress("one step 3/9 of a kind\nsteps") is None


def test_a_cluster_is_shown_with_idle_share_and_cost(tmp_path: Path) -> None:
    answers = {"/nodes": {"data": {"summary": NODES}}, "/api/jobs/": JOBS}
    with dashboard(answers | {"/api/v0/logs/file": printed_by_the_trainer(tmp_path).encode()}) as asked:
        found = look(asked, NOW, price_of(STACK))
    assert [each.address for each in found.nodes] == ["10.0.0.1", "10.0.0.2", "10.0.0.4"]
    assert found.idle == pytest.approx(0.4), "of those whose use is known"
    assert [(each.name, each.hours, each.progress and each.progress.step) for each in found.jobs] == [("sft", 0.5, None), ("grpo", 1.0, 2)]
    assert found.cost == pytest.approx(80), "two nodes at 20 USD for two hours"
    assert list(found.lines()) == [
        "GPUs idle now: 40%",
        "cost: 80.00 USD in 2.0 h, 40.00 an hour",
        "cost of grpo: 40.00 USD, 20.00 per 1,000 steps",
    ]
    text = io.StringIO()
    Console(file=text, width=160).print(top.screen(found, STACK))
    said = text.getvalue()
    assert "20% ?" in said and "40/80 40/80" in said and "2/100" in said and "8,450" in said, said


def test_a_price_that_nobody_knows_is_said() -> None:
    with dashboard({"/nodes": {"data": {"summary": []}}, "/api/jobs/": []}) as asked:
        found = look(asked, NOW, price_of(STACK.model_copy(update={"monitoring": type(STACK.monitoring)()})))
    assert found.idle is None and found.cost is None
    assert list(found.lines()) == ["cost: not known; flotilla:monitoring.price says what a node costs an hour"]


@pytest.mark.parametrize("answer", [{"data": {}}, [], {"data": {"summary": [{"raylet": {"state": "ALIVE"}}]}}])
def test_what_is_not_rays_dashboard_is_said(answer: Any) -> None:
    with dashboard({"/nodes": answer, "/api/jobs/": []}) as asked, pytest.raises(OSError, match="answers, but not as Ray's dashboard"):
        look(asked, NOW, None)


def test_dstacks_price_is_that_of_all_nodes_or_none() -> None:
    def run(*prices: float | None) -> Any:
        placed = [SimpleNamespace(job_provisioning_data=SimpleNamespace(price=price)) for price in prices]
        return SimpleNamespace(jobs=[SimpleNamespace(job_submissions=[each]) for each in placed])

    assert of_run(run(2.5, 2.5)) == 5
    assert of_run(run(2.5, 0.0)) is None, "your own machines have no price at dstack"
    assert of_run(None) is None
    assert per_1000_steps(36, Progress(1, 2, seconds=2.0)) == 20
    assert per_1000_steps(36, Progress(1, 2)) is None


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["nowhere"], "there is no stack 'nowhere'"),
        (["local", "--every", "0"], "--every 0 is not from 0.5 to 3600 seconds"),
        (["local", "--every", "soon"], "argument --every: invalid float value: 'soon'"),
        (["local", "--once"], "the cluster local is not up; first: flotilla up local"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = Path(__file__).parents[4]
    for name in ("Pulumi.yaml", "stacks/Pulumi.local.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((root / name).read_text())
    (tmp_path / "build/local").mkdir(parents=True)
    (tmp_path / "build/local/env.sh").write_text("")
    with pytest.raises((SystemExit, ValueError)) as found:
        top.main("top", arguments, tmp_path)
    assert error in str(found.value) + capsys.readouterr().err
