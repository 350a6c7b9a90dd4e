"""A stand-in for `ray start --block` that costs next to nothing, so that hundreds of nodes' agents run on one machine.

The head lists as ALIVE whose connection is open, as Ray's dashboard does. A worker is a connection that a shell holds.
"""

from __future__ import annotations

import json
import os
import socketserver
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

COMMAND = """#!/bin/bash
for argument in "$@"; do
  case $argument in
    --head) exec {python} {program} "$@" ;;
    --address=*) head=${{argument#*=}} ;;
    --node-ip-address=*) own=${{argument#*=}} ;;
  esac
done
exec 3<>/dev/tcp/${{head%:*}}/${{head##*:}} && echo "$own" >&3 && exec {wait} <&3 >/dev/null
"""


def install(folder: Path) -> None:
    """Puts it into a folder for PATH, as `ray`."""
    command = folder / "ray"
    command.write_text(COMMAND.format(python=sys.executable, program=Path(__file__).resolve(), wait="/bin/cat"))
    command.chmod(0o755)


class Nodes(dict[str, int]):
    """When each node that is ALIVE joined, in milliseconds since the epoch, by address."""

    def listed(self) -> bytes:
        nodes = [
            {
                "node_id": f"{index:056x}",
                "node_ip": address,
                "is_head_node": index == 0,
                "state": "ALIVE",
                "state_message": None,
                "node_name": address,
                "resources_total": {"CPU": 1.0, "memory": 1e9, "object_store_memory": 1e8, f"node:{address}": 1.0},
                "labels": {"ray.io/node-id": f"{index:056x}"},
                "start_time_ms": since,
                "end_time_ms": 0,
            }
            for index, (address, since) in enumerate([*self.items()])
        ]
        return json.dumps({"result": True, "msg": "", "data": {"result": {"result": nodes}}}).encode()


def main(arguments: list[str]) -> None:
    flags = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    own, port, dashboard = flags["--node-ip-address"], int(flags["--port"]), int(flags["--dashboard-port"])
    nodes = Nodes({own: int(time.time() * 1000)})

    class Join(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.wfile.write(b"ray\n")  # Ray speaks first too
            if address := self.rfile.readline().decode().strip():  # of others nothing comes: they ask whether the port answers
                nodes[address] = int(time.time() * 1000)
                self.rfile.read()
                nodes.pop(address, None)

    class Answer(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            known = urlsplit(self.path).path == "/api/v0/nodes"
            content = nodes.listed() if known else b"{}"
            self.send_response(200 if known else 404)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Joins(socketserver.ThreadingTCPServer):
        allow_reuse_address, daemon_threads, request_queue_size = True, True, 1024

    threading.Thread(target=ThreadingHTTPServer(("127.0.0.1", dashboard), Answer).serve_forever, daemon=True).start()
    Joins((own, port), Join).serve_forever()


if __name__ == "__main__":
    os.closerange(3, 20)
    main(sys.argv[1:])
