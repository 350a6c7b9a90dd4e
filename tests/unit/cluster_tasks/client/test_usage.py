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
from cluster_tasks.client import jobs
from cluster_tasks.client.jobs import find_jobs
from cluster_tasks.client.machines import hourly_price
from cluster_tasks.client.usage import look, per_1000_steps, pool_lines, price_of
from cluster_tasks.node.dashboard import Dashboard
from stacks.schema import Stack
from trainer.checkpoints.folders import Checkpoints
from trainer.metrics import Metrics
from trainer.metrics.progress import Progress

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


def written_by_the_trainer(folder: Path) -> dict[str, Any]:
    """A run that has resumed at step 1, of which step_1 is saved, and has done another step."""
    file, checkpoints = folder / "progress.json", Checkpoints(folder / "checkpoints", keep=3)
    for step in (1, 10):
        with checkpoints.writing(step, {}):
            pass
    (folder / "checkpoints/step_11.replaced").mkdir()
    checkpoints.draft(12).mkdir()
    sink = Progress(folder, done=10, total=100, file=file)
    assert json.loads(file.read_text()) == {"run": folder.name, "step": 10, "steps": 100, "checkpoint": f"{folder}/checkpoints/step_10"}
    with Metrics(folder, total=100, done=10, sinks=[sink], console=Console(quiet=True)) as metrics:
        metrics.log(11, {"reward": 0.5, "loss": float("nan"), "kl": 0.0, "tokens_per_second": 8450.0, "seconds": 1.8})
        metrics.log(11, {"eval_reward": 0.25})
    return json.loads(file.read_text())


def test_a_run_is_shown_as_the_trainer_writes_it(tmp_path: Path) -> None:
    page = "/api/v0/logs/file?node_id=abc&filename=progress-grpo.json&lines=1"
    with dashboard({"/api/jobs/": JOBS, page: written_by_the_trainer(tmp_path) | {"later": 1}}) as asked:
        [_, found] = find_jobs(asked, NOW)
    assert found.progress == jobs.Progress(
        tmp_path.name, 11, 100, f"{tmp_path}/checkpoints/step_10", reward=0.5, tokens_per_second=8450.0, seconds=1.8
    )
    assert found.progress and [*found.progress.lines()] == [
        "step 11/100  reward 0.5  8,450 tokens/s  1.80 s",
        f"checkpoint {tmp_path}/checkpoints/step_10",
    ]


def test_jobs_that_say_nothing_of_themselves_have_no_progress() -> None:
    for answers in ({}, {"/api/v0/logs/file": b""}, {"/api/v0/logs/file": b'{"step"'}, {"/api/v0/logs/file": {"step": 1}}):
        with dashboard({"/api/jobs/": JOBS} | answers) as asked:
            assert [job.progress for job in find_jobs(asked, NOW)] == [None, None]


def test_a_cluster_is_shown_with_idle_share_and_cost(tmp_path: Path) -> None:
    answers = {"/nodes": {"data": {"summary": NODES}}, "/api/jobs/": JOBS}
    with dashboard(answers | {"/api/v0/logs/file": written_by_the_trainer(tmp_path)}) as asked:
        found = look(asked, NOW, price_of(STACK))
    assert [each.address for each in found.nodes] == ["10.0.0.1", "10.0.0.2", "10.0.0.4"]
    assert found.idle == pytest.approx(0.4), "of those whose use is known"
    assert [(each.name, each.hours, each.progress and each.progress.step) for each in found.jobs] == [("sft", 0.5, None), ("grpo", 1.0, 11)]
    assert found.cost == pytest.approx(80), "two nodes at 20 USD for two hours"
    assert list(found.lines()) == [
        "GPUs idle now: 40%",
        "cost: 80.00 USD in 2.0 h, 40.00 an hour",
        "cost of grpo: 40.00 USD, 20.00 per 1,000 steps",
    ]
    text = io.StringIO()
    Console(file=text, width=160).print(top.screen(found, STACK))
    said = text.getvalue()
    assert "20% ?" in said and "40/80 40/80" in said and "11/100" in said and "8,450" in said, said


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

    assert hourly_price(run(2.5, 2.5)) == 5
    assert hourly_price(run(2.5, 0.0)) is None, "your own machines have no price at dstack"
    assert hourly_price(None) is None
    assert per_1000_steps(36, jobs.Progress("a", 1, 2, seconds=2.0)) == 20
    assert per_1000_steps(36, jobs.Progress("a", 1, 2)) is None


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


def test_pools_of_sandboxes_are_one_line_and_each_that_has_trouble_another():
    pool = {"node": "10.0.0.5:8266", "room": 32, "in_use": 12, "ready": 4, "waiting": 0, "leases": 30, "first_seconds": 0.06, "trouble": ""}
    pool["limited"] = {"memory": 3, "processes": 0, "timeout": 1}
    other = pool | {"node": "10.0.0.6:8266", "leases": 10, "first_seconds": 0.1, "ready": 0, "trouble": "no more namespaces"}
    silent = {"node": "10.0.0.7:8266", "why": "no answer within 3 s"}
    assert [*pool_lines([pool, other, silent])] == [
        "sandboxes: 24 of 64 in use, 4 ready, 0 waiting; first command after 0.07 s; stopped by limits: 6 memory, 2 timeout",
        "sandboxes of 10.0.0.6:8266: no more namespaces",
        "sandboxes of 10.0.0.7:8266: no answer within 3 s",
    ]
    fresh = pool | {"leases": 0, "first_seconds": None, "limited": dict.fromkeys(("memory", "processes", "timeout"), 0)}
    assert [*pool_lines([fresh])] == ["sandboxes: 12 of 32 in use, 4 ready, 0 waiting"] and not [*pool_lines([])]
