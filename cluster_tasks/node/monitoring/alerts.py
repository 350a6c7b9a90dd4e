"""Posts alerts to a webhook: each once when it fires, again after --repeat, and once when it is over.

    FLOTILLA_ALERT_URL=https://... python3 -I alerts.py --listen 41234 --repeat 14400 --secret FILE

Prometheus sends its alerts to /api/v2/alerts, as to an Alertmanager, again and again while they last. What is posted has the form of
Alertmanager's webhook, which many services take: https://prometheus.io/docs/alerting/latest/configuration/#webhook_config. Run by its
path, with -I, as node/identity.py: the standard library alone.

Only who shows the secret is heard: every user of the machine reaches the port. Prometheus has it from the same file, and shows it to
nobody, where it shows the paths that it asks to all who can ask it for its configuration.
"""

from __future__ import annotations

import argparse
import hmac
import json
import os
import sys
import threading
import time
import urllib.request
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

URL = "FLOTILLA_ALERT_URL"
PATH = "/api/v2/alerts"
POST_SECONDS = 10
LIMIT = 2**22  # bytes of a request

Alert = dict[str, Any]


class Memory:
    """Which alerts were posted, and when; by their labels, as Alertmanager knows them."""

    def __init__(self, repeat: float) -> None:
        self.repeat, self.posted = repeat, dict[str, float]()
        self.lock = threading.Lock()

    def due(self, alerts: list[Alert], now: float) -> list[Alert]:
        """Those to post now, with their status."""
        with self.lock:
            found = []
            for alert in alerts:
                key, over = json.dumps(alert.get("labels", {}), sort_keys=True), ended(alert, now)
                last = self.posted.get(key)
                if over and last is not None:
                    del self.posted[key]
                elif over or (last is not None and now - last < self.repeat):
                    continue
                else:
                    self.posted[key] = now
                found.append({**alert, "status": "resolved" if over else "firing"})
            return found

    def forget(self, alerts: list[Alert]) -> None:
        """They could not be posted: the next time they come they are due."""
        with self.lock:
            for alert in alerts:
                self.posted.pop(json.dumps(alert.get("labels", {}), sort_keys=True), None)


def ended(alert: Alert, now: float) -> bool:
    """Prometheus dates the end of one that lasts into the future."""
    text = alert.get("endsAt") or ""
    if not text or text.startswith("0001"):
        return False
    end = datetime.fromisoformat(text.partition(".")[0].rstrip("Z")).replace(tzinfo=timezone.utc)  # noqa: UP017 - nodes may have 3.10
    return end.timestamp() <= now


def message(alerts: list[Alert]) -> Alert:
    """As Alertmanager's webhook."""
    status = "firing" if any(alert["status"] == "firing" for alert in alerts) else "resolved"
    return {"version": "4", "status": status, "receiver": "flotilla", "alerts": alerts}


def post(url: str, content: Any, secret: str | None = None) -> None:
    """Raises OSError."""
    shown = {"Authorization": f"Bearer {secret}"} if secret else {}
    request = urllib.request.Request(url, json.dumps(content).encode(), {"Content-Type": "application/json", **shown}, method="POST")
    with urllib.request.urlopen(request, timeout=POST_SECONDS) as answer:
        answer.read()


def handler(url: str, memory: Memory, secret: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = POST_SECONDS  # of a connection that says nothing

        def do_POST(self) -> None:
            shown = self.headers.get("Authorization") or ""
            if not hmac.compare_digest(shown.encode("latin-1", "replace"), f"Bearer {secret}".encode()):
                return self.send_error(401)
            try:
                length = max(0, min(int(self.headers.get("Content-Length") or 0), LIMIT))
                alerts = json.loads(self.rfile.read(length)) if self.path == PATH else None
                due = memory.due(alerts, time.time()) if isinstance(alerts, list) else None
            except (ValueError, AttributeError, TypeError):
                due = None
            if due is None:
                return self.send_error(400)
            try:
                if due:
                    post(url, message(due))
                code = 200
            except (OSError, ValueError) as error:  # its text may have the URL, which is a secret
                memory.forget([alert for alert in due if alert["status"] == "firing"])
                print(f"alerts could not be posted: {type(error).__name__} {getattr(error, 'code', '')}", file=sys.stderr, flush=True)
                code = 502
            self.send_response(code)
            self.send_header("Content-Length", "0")
            return self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


def main() -> int:
    parser = argparse.ArgumentParser(prog="alerts.py", description="Posts Prometheus's alerts to a webhook.")
    parser.add_argument("--listen", type=int, required=True, help="port, on loopback")
    parser.add_argument("--repeat", type=float, required=True, help="seconds after which an alert that lasts is posted again")
    parser.add_argument(
        "--secret", type=Path, required=True, help="file with what has to be shown; a command line is for all users to read"
    )
    options = parser.parse_args()
    secret = options.secret.read_text()
    server = ThreadingHTTPServer(("127.0.0.1", options.listen), handler(os.environ[URL], Memory(options.repeat), secret))
    server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
