"""What a run has cost: in its metrics, over resumes, in its last line, and among Ray's metrics."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from trainer import compare
from trainer.metrics import Metrics, read
from trainer.metrics.cost import KEY, Cost, idle_share, price


@pytest.mark.parametrize(("text", "found"), [("36", 36.0), ("0", None), ("-1", None), ("nan", None), ("cheap", None), ("", None)])
def test_a_price_is_a_number_above_zero(text: str, found: float | None) -> None:
    assert price({"FLOTILLA_PRICE": text}) == found
    assert price({}) is None


def test_a_resumed_run_adds_to_what_it_had_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOTILLA_PRICE", "3600000")  # 1,000 USD a second
    with Metrics(tmp_path, total=4) as metrics:
        metrics.log(1, {"loss": 1.0})
        metrics.log(2, {"loss": 1.0})
        metrics.log(3, {"loss": 1.0})
    first = read(tmp_path)
    with Metrics(tmp_path, total=4, done=2) as metrics:
        metrics.log(3, {"loss": 1.0})
    rows = read(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert 0 < rows[0][KEY] < rows[1][KEY] == first[1][KEY] < rows[2][KEY]


def test_without_a_price_metrics_are_as_before_and_the_report_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLOTILLA_PRICE", raising=False)
    with Metrics(tmp_path, total=1) as metrics:
        metrics.log(1, {"loss": 1.0})
    assert read(tmp_path) == [{"step": 1, "loss": 1.0}]
    assert Cost(env={}).report(10) == "cost: not known, as flotilla:monitoring.price does not say what a node costs"


def test_the_same_run_twice_differs_in_cost_and_is_the_same() -> None:
    a, b = ([{"step": 1, "loss": 1.0, KEY: spent}] for spent in (1.0, 2.0))
    assert [found.key for found in compare.compare(a, b)] == ["loss"]


def test_the_report_has_the_idle_share_where_prometheus_knows_it() -> None:
    class Prometheus(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            asked = "avg_over_time%28flotilla_gpu_idle_share%5B60s%5D%29" in self.path
            result = [{"metric": {}, "value": [1, "0.25"]}] if asked else []
            self.wfile.write(json.dumps({"status": "success", "data": {"result": result}}).encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Prometheus) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        env = {"RAY_PROMETHEUS_HOST": f"http://127.0.0.1:{server.server_address[1]}", "FLOTILLA_PRICE": "36"}
        cost = Cost(before=2.0, env=env)
        assert cost.report(500) == "cost: 2.00 USD, 4.00 per 1,000 steps; the cluster's GPUs idled 25% of the time"
        server.shutdown()
    assert idle_share(60, env) is None, "it is gone"
    assert idle_share(60, {}) is None
