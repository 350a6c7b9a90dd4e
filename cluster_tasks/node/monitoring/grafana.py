"""Grafana on the head: its settings, its datasource and its dashboards; those of Ray are written by Ray."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from pathlib import Path
from typing import Any

from ..monitoring_settings import Monitoring
from ..settings import Settings
from .prometheus import ray_folder

UID = "flotilla"  # of the datasource
# (dashboard, [(title, unit, [(query, legend)])]); units are Grafana's own names
PANELS: dict[str, list[tuple[str, str, list[tuple[str, str]]]]] = {
    "Cluster": [
        ("Nodes", "none", [("count(count by (ip) (ray_node_cpu_utilization))", "nodes")]),
        ("CPU", "percent", [("avg by (ip) (ray_node_cpu_utilization)", "{{ip}}")]),
        ("Memory", "bytes", [("avg by (ip) (ray_node_mem_used)", "{{ip}}")]),
        ("Disk", "percent", [("max by (ip) (ray_node_disk_utilization_percentage)", "{{ip}}")]),
        ("Network received", "Bps", [("avg by (ip) (ray_node_network_receive_speed)", "{{ip}}")]),
        ("Network sent", "Bps", [("avg by (ip) (ray_node_network_send_speed)", "{{ip}}")]),
        ("Cost so far", "currencyUSD", [("flotilla_cost_usd", "cluster")]),
        ("Alerts", "none", [('count by (alertname) (ALERTS{alertstate="firing"})', "{{alertname}}")]),
    ],
    "GPUs": [
        ("Use", "percent", [("avg by (ip, GpuIndex) (ray_node_gpus_utilization)", "{{ip}} {{GpuIndex}}")]),
        ("Idle share", "percentunit", [("flotilla_gpu_idle_share", "all GPUs")]),
        ("Memory", "decmbytes", [("avg by (ip, GpuIndex) (ray_node_gram_used)", "{{ip}} {{GpuIndex}}")]),
        ("Tensor cores (DCGM)", "percentunit", [("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "{{instance}} {{gpu}}")]),
        ("Power", "watt", [("DCGM_FI_DEV_POWER_USAGE", "{{instance}} {{gpu}}"), ("gpu_package_power", "{{instance}} {{gpu_id}}")]),
        (
            "Temperature",
            "celsius",
            [("DCGM_FI_DEV_GPU_TEMP", "{{instance}} {{gpu}}"), ("gpu_junction_temperature", "{{instance}} {{gpu_id}}")],
        ),
        ("XID errors (DCGM)", "none", [("DCGM_FI_DEV_XID_ERRORS", "{{instance}} {{gpu}}")]),
        ("NVLink", "Bps", [("DCGM_FI_PROF_NVLINK_TX_BYTES", "{{instance}} {{gpu}} sent")]),
    ],
    "Trainer": [
        ("Step", "none", [("ray_trainer_step", "{{run}}")]),
        ("Reward", "none", [("ray_trainer_reward", "{{run}}"), ("ray_trainer_eval_reward", "{{run}} evaluation")]),
        ("Loss", "none", [("ray_trainer_loss", "{{run}}")]),
        ("KL", "none", [("ray_trainer_kl", "{{run}}")]),
        ("Tokens per second", "none", [("ray_trainer_tokens_per_second", "{{run}}")]),
        ("Step time", "s", [("ray_trainer_step_seconds", "{{run}}")]),
        ("Cost of the run", "currencyUSD", [("ray_trainer_cost_usd", "{{run}}")]),
        ("Cost per 1,000 steps", "currencyUSD", [("ray_trainer_cost_usd_per_1000_steps", "{{run}}")]),
    ],
    "vLLM": [
        (
            "Requests",
            "none",
            [
                ('{__name__=~"(ray_vllm_|vllm:)num_requests_running"}', "running {{instance}}"),
                ('{__name__=~"(ray_vllm_|vllm:)num_requests_waiting"}', "waiting {{instance}}"),
            ],
        ),
        ("KV cache", "percentunit", [('{__name__=~"(ray_vllm_|vllm:)kv_cache_usage_perc"}', "{{instance}}")]),
        ("Generated tokens per second", "none", [('rate({__name__=~"(ray_vllm_|vllm:)generation_tokens_total"}[1m])', "{{instance}}")]),
        ("Prompt tokens per second", "none", [('rate({__name__=~"(ray_vllm_|vllm:)prompt_tokens_total"}[1m])', "{{instance}}")]),
    ],
}


def find() -> str | None:
    return shutil.which("grafana") or shutil.which("grafana-server")


def home(program: str) -> Path:
    """Where its public files are: $GF_PATHS_HOME, as in its images, else where its packages have them, else beside the program."""
    given = os.environ.get("GF_PATHS_HOME")
    beside = Path(program).resolve().parent.parent
    places = [Path(given)] if given else [beside, Path("/usr/share/grafana")]
    return next((place for place in places if (place / "public").is_dir()), places[-1])


def command(program: str, folder: Path) -> str:
    words = [program, *(["server"] if Path(program).name == "grafana" else []), "--homepath", str(home(program))]
    return shlex.join([*words, "--config", str(folder / "grafana.ini")])


def files(settings: Settings, known: Monitoring, folder: Path) -> dict[str, str]:
    """Texts by name below `folder`."""
    texts = {
        "grafana.ini": ini(known, folder),
        "provisioning/datasources/prometheus.yaml": json.dumps(datasource(known), indent=1),
        "provisioning/dashboards/all.yaml": json.dumps(providers(settings, folder), indent=1),
    }
    return texts | {f"dashboards/{name.lower()}.json": json.dumps(dashboard(name), indent=1) for name in PANELS}


def ini(known: Monitoring, folder: Path) -> str:
    """Nobody logs in: loopback alone reaches it, and who does may look."""
    sections: dict[str, dict[str, object]] = {
        "server": {"http_addr": "127.0.0.1", "http_port": known.grafana_port},
        "paths": {"data": folder / "grafana", "logs": folder / "grafana/log", "provisioning": folder / "provisioning"},
        "auth": {"disable_login_form": "true"},
        "auth.anonymous": {"enabled": "true", "org_role": "Viewer"},
        "security": {"allow_embedding": "true", "disable_initial_admin_creation": "true"},
        "analytics": {"reporting_enabled": "false", "check_for_updates": "false", "check_for_plugin_updates": "false"},
        "plugins": {"preinstall_disabled": "true"},
        "log": {"mode": "console", "level": "warn"},
    }
    return "\n".join("\n".join([f"[{name}]", *(f"{key} = {value}" for key, value in of.items()), ""]) for name, of in sections.items())


def datasource(known: Monitoring) -> dict[str, Any]:
    url = f"http://127.0.0.1:{known.prometheus_port}"
    one = {"name": "Prometheus", "uid": UID, "type": "prometheus", "access": "proxy", "url": url, "isDefault": True}
    return {"apiVersion": 1, "datasources": [one]}


def providers(settings: Settings, folder: Path) -> dict[str, Any]:
    places = {"Flotilla": folder / "dashboards", "Ray": ray_folder(settings) / "session_latest/metrics/grafana/dashboards"}
    return {
        "apiVersion": 1,
        "providers": [
            {"name": name, "folder": name, "type": "file", "allowUiUpdates": False, "options": {"path": str(path)}}
            for name, path in places.items()
        ],
    }


def dashboard(name: str) -> dict[str, Any]:
    """Two panels in a row."""
    panels = [
        {
            "id": number + 1,
            "title": title,
            "type": "timeseries",
            "datasource": {"type": "prometheus", "uid": UID},
            "gridPos": {"x": number % 2 * 12, "y": number // 2 * 8, "w": 12, "h": 8},
            "fieldConfig": {"defaults": {"unit": unit, "min": 0 if unit == "percent" else None}, "overrides": []},
            "targets": [{"refId": "ABCDEF"[index], "expr": expr, "legendFormat": legend} for index, (expr, legend) in enumerate(queries)],
        }
        for number, (title, unit, queries) in enumerate(PANELS[name])
    ]
    time = {"from": "now-1h", "to": "now"}
    return {"uid": f"flotilla-{name.lower()}", "title": name, "schemaVersion": 39, "refresh": "15s", "time": time, "panels": panels}
