"""The HTTP API by which dstack's server drives a job, and the process around it."""

from __future__ import annotations

import argparse
import base64
import contextlib
import email
import hashlib
import json
import os
import signal
import struct
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from lab.dstack.host.runner.commands import execute
from lab.dstack.host.runner.container import Account, start_ssh
from lab.dstack.host.runner.job import job, lock

VERSION = "0.22.5"
WEBSOCKET = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455


class Api(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    ssh_port = 0

    def log_message(self, format: str, *args: Any) -> None:
        print("runner", format % args, flush=True)

    def answer(self, code: int, content: Any = None) -> None:
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if path == "/api/healthcheck":
            self.answer(200, {"service": "dstack-runner", "version": VERSION})
        elif path == "/api/pull":
            self.pull(int(query.partition("timestamp=")[2] or 0))
        elif path == "/logs_ws":
            self.follow()
        else:
            self.answer(404)

    def pull(self, since: int) -> None:
        with lock:
            ended = job.done or job.stopped
            news = {
                "job_states": [state for state in job.states if state["timestamp"] > since],
                "job_logs": [line for line in job.logs if line["timestamp"] > since],
                "runner_logs": [],
                "last_updated": job.last,
                "no_connections_secs": 0,
                "has_more": not ended,
            }
        self.answer(200, news)
        job.pulled = job.pulled or ended

    def follow(self) -> None:
        """The output as it comes, on a websocket."""
        accepted = base64.b64encode(hashlib.sha1(self.headers["Sec-WebSocket-Key"].encode() + WEBSOCKET).digest()).decode()
        self.send_response(101)
        for name, value in (("Upgrade", "websocket"), ("Connection", "Upgrade"), ("Sec-WebSocket-Accept", accepted)):
            self.send_header(name, value)
        self.end_headers()
        self.close_connection, sent = True, 0
        with contextlib.suppress(OSError):  # nobody follows any more
            while not job.done or sent < len(job.raw):
                with lock:
                    new = job.raw[sent:]
                for data in new:
                    size = bytes([len(data)]) if len(data) < 126 else bytes([126]) + struct.pack(">H", len(data))
                    self.wfile.write(b"\x82" + size + data)
                sent += len(new)
                self.wfile.flush()
                time.sleep(0.2)
            self.wfile.write(b"\x88\x00")

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path == "/api/submit":
            job.body = json.loads(raw)
        elif self.path == "/api/upload_archive":
            message = email.message_from_bytes(b"Content-Type: " + self.headers["Content-Type"].encode() + b"\r\n\r\n" + raw)
            job.archives.update({part.get_filename(): part.get_payload(decode=True) for part in message.get_payload()})  # type: ignore[union-attr,misc]
        elif self.path == "/api/run":
            threading.Thread(target=execute, args=(self.ssh_port,), daemon=True).start()
            return self.answer(200, who_and_where(job.body["job_spec"]))
        elif self.path == "/api/stop":
            job.stopped = True
            job.interrupt()
        elif self.path != "/api/upload_code":
            return self.answer(404)
        return self.answer(200)


def who_and_where(spec: dict[str, Any]) -> dict[str, str] | None:
    """By which account people log in, and where the job runs; nothing where the image does not know the user, and the job fails."""
    with contextlib.suppress(KeyError):
        return {"username": Account.of(spec.get("user")).name, "working_dir": spec.get("working_dir") or str(Path.cwd())}
    return None


def main() -> None:
    if "--version" in sys.argv:
        return print("dstack-runner version", VERSION)
    parser = argparse.ArgumentParser()
    for name in ("--log-level", "--temp-dir", "--http-address"):
        parser.add_argument(name, default="")
    for name in ("--http-port", "--ssh-port"):
        parser.add_argument(name, type=int)
    parser.add_argument("--ssh-authorized-key", action="append", default=[])
    parser.add_argument("command")
    flags = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    ssh = start_ssh(flags.ssh_port, flags.ssh_authorized_key)
    Api.ssh_port = flags.ssh_port
    threading.Thread(target=ThreadingHTTPServer((flags.http_address, flags.http_port), Api).serve_forever, daemon=True).start()
    while not job.done:
        time.sleep(0.5)
    end = time.monotonic() + 300
    while not job.pulled and time.monotonic() < end:
        time.sleep(0.5)
    time.sleep(3)  # for who follows the output
    ssh.terminate()
    return None
