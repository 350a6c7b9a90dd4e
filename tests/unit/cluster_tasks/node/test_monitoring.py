"""What the head runs to watch a cluster: its files, its alerts, and what is missing."""

from __future__ import annotations

import configparser
import json
import logging
import shutil
import socket
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cluster_tasks.node.monitoring import alerts, grafana, programs, prometheus
from cluster_tasks.node.monitoring_settings import Monitoring
from cluster_tasks.node.ports import free_port
from cluster_tasks.node.settings import Settings, read_settings

FIRING = {"labels": {"alertname": "FullDisk", "ip": "10.0.0.1"}, "endsAt": "2026-01-01T00:10:00.123Z"}
OVER = 1767226201.0  # seconds after endsAt
DURING = OVER - 300


def known(**changes: Any) -> dict[str, Any]:
    numbers = {"idle_gpu": 1800, "idle_percent": 5, "silent_trainer": 1800, "full_disk": 90, "repeat": 14400}
    ports = {"prometheus_port": free_port(), "grafana_port": free_port(), "retention": "15d", "exporters": [9400], "webhook": None}
    return ports | numbers | changes


def settings(folder: Path, **changes: Any) -> Settings:
    flags = ["--rank", "0", "--addresses", "10.0.0.1,fd00::2", "--port", str(free_port()), "--temp-dir", str(folder)]
    return read_settings([*flags, "--stack", "lab", "--monitoring", json.dumps(known(**changes))], {})


def program(folder: Path, name: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("#!/bin/sh\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize("text", ["{", "[1]", '{"exporters": []}', json.dumps({"exporters": [], "port": 1})])
def test_what_is_no_monitoring_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^--monitoring .* is not JSON of its settings"):
        Monitoring.of(text)


def test_without_prometheus_the_cluster_starts_and_one_line_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    made = settings(tmp_path)
    assert made.monitoring
    assert programs.services(made) == [] and programs.taken(made.monitoring) == []
    [record] = caplog.records
    assert record.levelno == logging.WARNING and "no `prometheus` on PATH" in record.message
    assert programs.ray_environment(made.monitoring)["RAY_GRAFANA_HOST"] == "DISABLED"


def test_with_both_programs_ray_and_the_browser_find_grafana(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for name in ("prometheus", "grafana"):
        program(tmp_path / "bin", name)
    made = settings(tmp_path, webhook="HOOK")
    assert made.monitoring
    assert [service.name for service in programs.services(made)] == ["alerts", "prometheus", "grafana"]
    assert not any(service.port for service in programs.services(made)), "no job waits for them"
    assert made.alerts_secret and made.alerts_secret.stat().st_mode & 0o777 == 0o600
    secret = made.alerts_secret.read_text()
    assert len(secret) == 64 and not any(secret in service.command for service in programs.services(made))
    assert secret not in (made.place / programs.FOLDER / prometheus.CONFIG).read_text(), "Prometheus shows it to all who ask"
    there = f"http://localhost:{made.monitoring.grafana_port}"
    env = programs.ray_environment(made.monitoring)
    assert (env["RAY_GRAFANA_HOST"], env["RAY_GRAFANA_IFRAME_HOST"]) == (there, there)
    assert programs.unset(made.monitoring, {}) == "flotilla:monitoring.alerts.webhook names $HOOK, which is not set on this node"


@pytest.mark.skipif(not shutil.which("promtool"), reason="needs Debian's prometheus")
def test_promtool_takes_configuration_and_rules(tmp_path: Path) -> None:
    made = settings(tmp_path, price=3.5)
    assert made.monitoring
    made.alerts_port, made.alerts_secret = 9093, tmp_path / "secret"
    made.alerts_secret.write_text("s3cret")
    for name, text in prometheus.files(made, made.monitoring, 1767225600).items():
        (tmp_path / name).write_text(text)
    for what, name in (("config", prometheus.CONFIG), ("rules", prometheus.RULES)):
        done = subprocess.run(["promtool", "check", what, name], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_exporters_are_asked_on_every_node_and_rays_targets_are_its_own(tmp_path: Path) -> None:
    made = settings(tmp_path)
    assert made.monitoring
    jobs = {job["job_name"]: job for job in prometheus.config(made, made.monitoring)["scrape_configs"]}
    assert jobs["exporter-9400"]["static_configs"] == [{"targets": ["10.0.0.1:9400", "[fd00::2]:9400"]}]
    assert jobs["ray"]["file_sd_configs"][0]["files"] == [f"{tmp_path}/prom_metrics_service_discovery.json"]


def test_grafana_listens_on_loopback_and_its_dashboards_ask_its_datasource(tmp_path: Path) -> None:
    made = settings(tmp_path)
    assert made.monitoring
    texts = grafana.files(made, made.monitoring, tmp_path)
    ini = configparser.ConfigParser(interpolation=None)
    ini.read_string(texts["grafana.ini"])
    assert (ini["server"]["http_addr"], ini.getint("server", "http_port")) == ("127.0.0.1", made.monitoring.grafana_port)
    assert ini.getboolean("security", "allow_embedding") and ini["auth.anonymous"]["org_role"] == "Viewer"
    [source] = json.loads(texts["provisioning/datasources/prometheus.yaml"])["datasources"]
    assert source["url"] == f"http://127.0.0.1:{made.monitoring.prometheus_port}"
    boards = [json.loads(text) for name, text in texts.items() if name.startswith("dashboards/")]
    assert {board["title"] for board in boards} == {"Cluster", "GPUs", "Trainer", "vLLM"}
    for board in boards:
        assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"]) > 3
        assert {panel["datasource"]["uid"] for panel in board["panels"]} == {source["uid"]}


def test_an_alert_is_due_once_then_after_a_while_and_when_it_is_over() -> None:
    memory = alerts.Memory(repeat=100)
    assert [alert["status"] for alert in memory.due([FIRING], DURING)] == ["firing"]
    assert memory.due([FIRING], DURING + 99) == []
    assert [alert["status"] for alert in memory.due([FIRING], DURING + 100)] == ["firing"]
    assert [alert["status"] for alert in memory.due([FIRING], OVER)] == ["resolved"]
    assert memory.due([FIRING], OVER + 1) == [], "it was over already"


def test_what_could_not_be_posted_is_due_again() -> None:
    memory = alerts.Memory(repeat=100)
    memory.forget(memory.due([FIRING], DURING))
    assert memory.due([FIRING], DURING + 1)


TESTED = {
    "evaluation_interval": "1m",
    "rule_files": ["rules.json"],
    "tests": [
        {
            "interval": "1m",
            "input_series": [
                {"series": 'ray_node_gpus_utilization{ip="10.0.0.1", GpuIndex="0"}', "values": "0x60"},
                {"series": 'ray_node_gpus_utilization{ip="10.0.0.1", GpuIndex="1"}', "values": "0x20 80 0x39"},  # it worked once
                {"series": 'ray_trainer_last_step_timestamp_seconds{run="stuck"}', "values": "0x60"},
                {"series": 'ray_trainer_running{run="stuck"}', "values": "1x60"},
                {"series": 'ray_trainer_last_step_timestamp_seconds{run="done"}', "values": "0x60"},
                {"series": 'ray_trainer_running{run="done"}', "values": "0x60"},
                {"series": 'ray_node_disk_utilization_percentage{ip="10.0.0.1"}', "values": "91x60"},
                {"series": 'ray_node_disk_utilization_percentage{ip="10.0.0.2"}', "values": "90x60"},
                {"series": 'up{job="ray", instance="10.0.0.1:1"}', "values": "1x60"},
                {"series": 'up{job="ray", instance="10.0.0.2:1"}', "values": "1x9 0x10 1x40"},  # gone, and back
                {"series": 'flotilla_sandboxes_to_keep{job="sandboxes", instance="10.0.0.1:8266"}', "values": "4x60"},
                {"series": 'flotilla_sandboxes_ready{job="sandboxes", instance="10.0.0.1:8266"}', "values": "1x9 0x3 1x9 0x40"},
                {"series": 'flotilla_sandboxes_to_keep{job="sandboxes", instance="10.0.0.2:8266"}', "values": "0x60"},  # it is full
                {"series": 'flotilla_sandboxes_ready{job="sandboxes", instance="10.0.0.2:8266"}', "values": "0x60"},
                {"series": 'up{job="prometheus", instance="127.0.0.1:9090"}', "values": "0x60"},
            ],
            "alert_rule_test": [
                {"eval_time": "29m", "alertname": "IdleGpu", "exp_alerts": []},
                {
                    "eval_time": "40m",
                    "alertname": "IdleGpu",
                    "exp_alerts": [
                        {
                            "exp_labels": {"severity": "warning", "ip": "10.0.0.1", "GpuIndex": "0"},
                            "exp_annotations": {"summary": "GPU 0 of 10.0.0.1 is used to 0 %"},
                        }
                    ],
                },
                {"eval_time": "30m", "alertname": "SilentTrainer", "exp_alerts": []},
                {
                    "eval_time": "31m",
                    "alertname": "SilentTrainer",
                    "exp_alerts": [
                        {
                            "exp_labels": {"severity": "warning", "run": "stuck"},
                            "exp_annotations": {"summary": "the run stuck has finished no step for 31m 0s"},
                        }
                    ],
                },
                {
                    "eval_time": "2m",
                    "alertname": "FullDisk",
                    "exp_alerts": [
                        {
                            "exp_labels": {"severity": "warning", "ip": "10.0.0.1"},
                            "exp_annotations": {"summary": "the disk of 10.0.0.1 is full to 91 %"},
                        }
                    ],
                },
                {"eval_time": "20m", "alertname": "NoSandboxReady", "exp_alerts": []},
                {
                    "eval_time": "40m",
                    "alertname": "NoSandboxReady",
                    "exp_alerts": [
                        {
                            "exp_labels": {"severity": "warning", "job": "sandboxes", "instance": "10.0.0.1:8266"},
                            "exp_annotations": {
                                "summary": "the pool 10.0.0.1:8266 has had no sandbox ready for 5 minutes; "
                                "the log of that node's agent names its output"
                            },
                        }
                    ],
                },
                {"eval_time": "11m", "alertname": "NodeSilent", "exp_alerts": []},
                {
                    "eval_time": "12m",
                    "alertname": "NodeSilent",
                    "exp_alerts": [
                        {
                            "exp_labels": {"severity": "warning", "job": "ray", "instance": "10.0.0.2:1"},
                            "exp_annotations": {"summary": "the metrics of 10.0.0.2:1 do not answer"},
                        }
                    ],
                },
                {"eval_time": "22m", "alertname": "NodeSilent", "exp_alerts": []},
            ],
            "promql_expr_test": [
                {"expr": "flotilla_cost_usd", "eval_time": "60m", "exp_samples": [{"labels": "flotilla_cost_usd", "value": 3.5}]},
                {
                    "expr": "flotilla_gpu_idle_share",
                    "eval_time": "21m",
                    "exp_samples": [{"labels": "flotilla_gpu_idle_share", "value": 0.6}],
                },
            ],
        }
    ],
}


def test_every_rule_has_its_test() -> None:
    named = Monitoring.of(json.dumps(known(price=1)))
    assert named
    [group] = prometheus.rules(named, 0)["groups"]
    tested = {each["alertname"] for each in TESTED["tests"][0]["alert_rule_test"] if each["exp_alerts"]}
    assert {rule["alert"] for rule in group["rules"] if "alert" in rule} == tested


@pytest.mark.skipif(not shutil.which("promtool"), reason="needs Debian's prometheus")
def test_alerts_are_raised_when_they_are_due_and_for_nobody_else(tmp_path: Path) -> None:
    made = settings(tmp_path, price=3.5)
    assert made.monitoring
    (tmp_path / prometheus.RULES).write_text(prometheus.files(made, made.monitoring, 0)[prometheus.RULES])
    (tmp_path / "test.json").write_text(json.dumps(TESTED))
    done = subprocess.run(["promtool", "test", "rules", "test.json"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


class Server(ThreadingHTTPServer):
    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


def test_an_alert_is_posted_as_alertmanager_does_and_its_url_is_in_no_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    got: list[Any] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200 if len(got) > 1 else 500)  # it is down at first
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with Server(Receiver) as receiver, Server(alerts.handler(f"{receiver.url}/canary", alerts.Memory(1000), "s3cret")) as relay:
        lasting = {"labels": {"alertname": "IdleGpu"}, "annotations": {"summary": "GPU 3"}}
        with pytest.raises(OSError, match="502"):
            alerts.post(f"{relay.url}{alerts.PATH}", [lasting], "s3cret")
        for _ in range(3):
            alerts.post(f"{relay.url}{alerts.PATH}", [lasting], "s3cret")
        (tmp_path / "secret").write_text("s3cret")
        made = SimpleNamespace(alerts_port=relay.server_address[1], alerts_secret=tmp_path / "secret")
        programs.notify(cast(Settings, made), "NodeReclaimed", "the cloud takes 10.0.0.5 back")
        with pytest.raises(OSError, match="400"):
            alerts.post(f"{relay.url}{alerts.PATH}", "no list", "s3cret")
        for stranger in (None, "", "guess", "s3cret2", "\xe9"):
            with pytest.raises(OSError, match="401"):
                alerts.post(f"{relay.url}{alerts.PATH}", [lasting], stranger)
        receiver.shutdown()
        relay.shutdown()
    assert len(got) == 3, "once that failed, once that was taken, and the agent's own"
    assert got[1] == {"version": "4", "status": "firing", "receiver": "flotilla", "alerts": [{**lasting, "status": "firing"}]}
    assert got[2]["alerts"][0]["annotations"]["summary"] == "the cloud takes 10.0.0.5 back"
    said = capsys.readouterr().err
    assert "could not be posted: HTTPError 500" in said and "canary" not in said


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        ("GET / HTTP/1.1\r\n\r\n", "501"),
        (f"POST {alerts.PATH} HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n", "401"),  # none of which is read
        (f"POST {alerts.PATH} HTTP/1.1\r\nCookie: s3cret\r\nContent-Length: 2\r\n\r\n[]", "401"),
        ("POST /x HTTP/1.1\r\nAuthorization: Bearer s3cret\r\nContent-Length: 2\r\n\r\n[]", "400"),
        (f"POST {alerts.PATH} HTTP/1.1\r\nAuthorization: Bearer s3cret\r\nContent-Length: -1\r\n\r\n", "400"),
        (f"POST {alerts.PATH} HTTP/1.1\r\nAuthorization: Bearer s3cret\r\nContent-Length: x\r\n\r\n", "400"),
    ],
)
def test_what_strangers_and_broken_clients_send_to_the_relay_is_refused_at_once(request_: str, code: str) -> None:
    with Server(alerts.handler("http://127.0.0.1:1/", alerts.Memory(1000), "s3cret")) as relay:
        with socket.create_connection(("127.0.0.1", relay.server_address[1]), timeout=5) as stranger:
            stranger.sendall(request_.encode())
            assert stranger.recv(100).split()[1].decode() == code
        relay.shutdown()
