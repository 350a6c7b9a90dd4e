"""Prometheus on the head: what it asks, which alerts it raises. Its files are JSON, which is YAML too."""

from __future__ import annotations

import json
import shlex
import tempfile
from pathlib import Path
from typing import Any

from .. import queue_service, sandbox_pool, sandbox_status
from ..monitoring_settings import Monitoring
from ..settings import Settings

CONFIG, RULES = "prometheus.json", "rules.json"
DISCOVERY = "prom_metrics_service_discovery.json"  # Ray writes it: https://docs.ray.io/en/latest/cluster/metrics.html
EVERY = "15s"
RAY_FOLDER = "ray"  # below the temporary folder, where --temp-dir is not given


def ray_folder(settings: Settings) -> Path:
    return Path(settings.temp_dir or Path(tempfile.gettempdir()) / RAY_FOLDER)


def command(program: str, folder: Path, known: Monitoring) -> str:
    flags = {
        "--config.file": folder / CONFIG,
        "--storage.tsdb.path": folder / "data",
        "--storage.tsdb.retention.time": known.retention,
        "--web.listen-address": f"127.0.0.1:{known.prometheus_port}",
        "--log.level": "warn",
    }
    return shlex.join([program, *(f"{name}={value}" for name, value in flags.items())])


def files(settings: Settings, known: Monitoring, started: float) -> dict[str, str]:
    """Texts by name; `started`: when the cluster did, in seconds since the epoch."""
    return {CONFIG: json.dumps(config(settings, known), indent=1), RULES: json.dumps(rules(known, started), indent=1)}


def config(settings: Settings, known: Monitoring) -> dict[str, Any]:
    jobs: list[dict[str, Any]] = [
        {"job_name": "ray", "file_sd_configs": [{"files": [str(ray_folder(settings) / DISCOVERY)], "refresh_interval": "10s"}]},
        {"job_name": "prometheus", "static_configs": [{"targets": [f"127.0.0.1:{known.prometheus_port}"]}]},
    ]
    if queue_service.is_here(settings):
        queue: dict[str, Any] = {"job_name": "queue", "metrics_path": f"/flotilla/at/{queue_service.ROUTE}/metrics"}
        queue["static_configs"] = [{"targets": [f"127.0.0.1:{settings.dashboard_port}"]}]
        shown = {"authorization": {"credentials_file": str(queue_service.token_file(settings))}} if settings.dashboard.token else {}
        jobs.append(queue | shown)
    if pools := sandbox_status.pool_addresses(settings):
        shown = {"authorization": {"credentials_file": str(sandbox_status.token_file(settings))}}
        jobs.append({"job_name": sandbox_pool.NAME, "static_configs": [{"targets": pools}], **shown})
    for port in known.exporters:
        targets = [f"[{address}]:{port}" if ":" in address else f"{address}:{port}" for address in settings.addresses]
        jobs.append({"job_name": f"exporter-{port}", "static_configs": [{"targets": targets}]})
    made: dict[str, Any] = {
        "global": {"scrape_interval": EVERY, "evaluation_interval": EVERY, "external_labels": {"stack": settings.stack or "ray"}},
        "rule_files": [RULES],
        "scrape_configs": jobs,
    }
    if settings.alerts_port:
        relay = {"static_configs": [{"targets": [f"127.0.0.1:{settings.alerts_port}"]}]}
        made["alerting"] = {"alertmanagers": [relay | {"authorization": {"credentials_file": str(settings.alerts_secret)}}]}
    return made


def rules(known: Monitoring, started: float) -> dict[str, Any]:
    """Alerts, and records of what is not measured but follows: idle share, cost."""
    silent = "(time() - max by (run) (ray_trainer_last_step_timestamp_seconds)) > {} and on (run) max by (run) (ray_trainer_running) > 0"
    alerts = [
        alert(
            "IdleGpu",
            f"avg by (ip, GpuIndex) (ray_node_gpus_utilization) < {known.idle_percent}",
            f"{known.idle_gpu}s",
            'GPU {{ $labels.GpuIndex }} of {{ $labels.ip }} is used to {{ $value | printf "%.0f" }} %',
        ),
        alert(
            "SilentTrainer",
            silent.format(known.silent_trainer),
            "0s",
            "the run {{ $labels.run }} has finished no step for {{ $value | humanizeDuration }}",
        ),
        alert(
            "FullDisk",
            f"max by (ip) (ray_node_disk_utilization_percentage) > {known.full_disk}",
            "1m",
            'the disk of {{ $labels.ip }} is full to {{ $value | printf "%.0f" }} %',
        ),
        alert(
            "NoSandboxReady",
            f'(flotilla_sandboxes_to_keep > 0 and flotilla_sandboxes_ready == 0) or up{{job="{sandbox_pool.NAME}"}} == 0',
            "5m",
            "the pool {{ $labels.instance }} has had no sandbox ready for 5 minutes; the log of that node's agent names its output",
        ),
        alert("NodeSilent", 'up{job="ray"} == 0', "2m", "the metrics of {{ $labels.instance }} do not answer"),
    ]
    hours = f"(time() - {started:.0f}) / 3600"
    records = [{"record": "flotilla_gpu_idle_share", "expr": "1 - avg(ray_node_gpus_utilization) / 100"}]
    if known.price is not None:
        records.append({"record": "flotilla_cost_usd", "expr": f"vector({known.price:g} * {hours})"})
    return {"groups": [{"name": "flotilla", "rules": [*records, *alerts]}]}


def alert(name: str, expr: str, lasting: str, summary: str) -> dict[str, Any]:
    return {"alert": name, "expr": expr, "for": lasting, "labels": {"severity": "warning"}, "annotations": {"summary": summary}}
