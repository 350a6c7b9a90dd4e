"""Prometheus, Grafana and alerts on the head, of --monitoring: which of them can run here, on what files, and as which services.

A program that is not installed is one line in the log; the cluster starts without it, and Ray's own metrics answer as before.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from ..monitoring_settings import Monitoring
from ..ports import free_port, port_is_free
from ..service import Service
from ..settings import Settings
from . import grafana, prometheus
from .alerts import post

FOLDER = "monitoring"  # below the services' folder
DATASOURCE = "Prometheus"  # as Ray's dashboards and Grafana call it
URL_VARIABLE = "FLOTILLA_ALERT_URL"  # of alerts.py: a command line is for all users to read

log = logging.getLogger(__name__)


def taken(known: Monitoring | None) -> list[str]:
    """Ports of this node that something else listens on, in words. What is not installed needs none."""
    if known is None:
        return []
    ports = [("prometheus_port", known.prometheus_port, find_prometheus()), ("grafana_port", known.grafana_port, grafana.find())]
    return [
        f"port {port} is in use on this node, perhaps by another cluster's monitoring; choose another: flotilla:monitoring.{key}"
        for key, port, program in ports
        if program and not port_is_free(port)
    ]


def find_prometheus() -> str | None:
    return shutil.which("prometheus")


def ray_environment(known: Monitoring | None) -> dict[str, str]:
    """Where Ray's dashboard finds both, and the browser Grafana: on the same port, forwarded."""
    if known is None:
        return {}
    there = f"http://localhost:{known.grafana_port}" if grafana.find() and find_prometheus() else "DISABLED"  # Ray's own word
    return {
        "RAY_PROMETHEUS_HOST": f"http://localhost:{known.prometheus_port}",
        "RAY_PROMETHEUS_NAME": DATASOURCE,
        "RAY_GRAFANA_HOST": there,
        "RAY_GRAFANA_IFRAME_HOST": there,
    }


def services(settings: Settings) -> list[Service]:
    """The head's, on files that are written here. Without ports for the agent: no job waits for them."""
    known = settings.monitoring
    if known is None:
        return []
    folder, found = settings.place / FOLDER, []
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    program = find_prometheus()
    if program is None:
        log.warning("no `prometheus` on PATH: no dashboards, no alerts; each node's own metrics answer, and flotilla top works")
        return []
    settings.alerts_port = free_port() if known.webhook else None
    if known.webhook:
        settings.alerts_secret = folder / "alerts.secret"
        settings.alerts_secret.touch(0o600)
        settings.alerts_secret.write_text(secrets.token_hex(32))
        found.append(Service("alerts", _alerts(known, settings.alerts_port or 0, settings.alerts_secret)))
    for name, text in prometheus.files(settings, known, time.time()).items():
        (folder / name).write_text(text)
    found.append(Service("prometheus", "exec " + prometheus.command(program, folder, known)))
    if grafana_program := grafana.find():
        for name, text in grafana.files(settings, known, folder).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        found.append(Service("grafana", "exec " + grafana.command(grafana_program, folder)))
    else:
        log.warning("no `grafana` on PATH: no Grafana panels; Prometheus answers on port %d", known.prometheus_port)
    return found


def _alerts(known: Monitoring, port: int, secret: Path) -> str:
    """The URL comes by a variable, so that it stands in no command line."""
    program = Path(__file__).with_name("alerts.py")
    flags = f'--listen {port} --repeat {known.repeat} --secret "{secret}"'
    return f'{URL_VARIABLE}="${known.webhook}" exec "{sys.executable}" -I "{program}" {flags}'


def notify(settings: Settings, name: str, summary: str) -> None:
    """An alert of the agent's own, for what leaves no time for Prometheus."""
    if settings.alerts_port and settings.alerts_secret:
        alert = {"labels": {"alertname": name, "severity": "warning"}, "annotations": {"summary": summary}}
        try:
            post(f"http://127.0.0.1:{settings.alerts_port}/api/v2/alerts", [alert], settings.alerts_secret.read_text())
        except OSError as error:
            log.warning("the alert %s was not sent: %s", name, error)


def unset(known: Monitoring | None, env: Mapping[str, str] = os.environ) -> str | None:
    """The webhook's variable, where it has no URL."""
    name = known.webhook if known else None
    if name and not env.get(name, "").startswith(("http://", "https://")):
        return f"flotilla:monitoring.alerts.webhook names ${name}, which {'is not a URL' if env.get(name) else 'is not set'} on this node"
    return None
