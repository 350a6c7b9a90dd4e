"""droplets.py PORT CLOUDS KEY: the part of DigitalOcean's API that dstack asks, for each cloud of the file CLOUDS below /NAME.

A machine is one of the cloud's hosts, which boots what the request gives it as user data: https://docs.digitalocean.com/reference/api
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

KEY = sys.argv[3]
# There is no firewall on a host, and Docker is there already.
STUBS = "for tool in ufw apt-get gpg lsb_release; do printf '#!/bin/sh\\n' >/usr/local/bin/$tool; chmod +x /usr/local/bin/$tool; done"
lock = threading.Lock()


@dataclass
class Cloud:
    price: float
    hosts: list[str]
    rented: dict[str, str] = field(default_factory=dict)  # address by id
    keys: list[dict[str, Any]] = field(default_factory=list)
    made: int = 0
    sold_out: bool = False

    def sizes(self) -> list[dict[str, Any]]:
        """One type, whose region is this machine."""
        disk = [{"type": "local", "size": {"amount": 100, "unit": "gib"}}]
        return [{"slug": "s-2", "memory": 4096, "vcpus": 2, "disk_info": disk, "regions": ["here"], "price_hourly": self.price}]

    def rent(self, config: dict[str, Any]) -> dict[str, Any] | None:
        """None where no machine is left."""
        with lock:
            if self.sold_out or not self.hosts:
                return None
            self.made += 1
            number, address = str(self.made), self.hosts.pop(0)
            self.rented[number] = address
        threading.Thread(target=boot, args=(address, config["user_data"]), daemon=True).start()
        return self.droplet(number)

    def droplet(self, number: str) -> dict[str, Any]:
        networks = {"v4": [{"type": "public", "ip_address": self.rented[number]}]}
        return {"id": int(number), "status": "active", "networks": networks}

    def give_back(self, number: str) -> None:
        with lock:
            address = self.rented.pop(number)
        run(address, "pkill -f '[d]stack-shim' ; docker ps -aq | xargs -r docker rm -f")
        with lock:
            self.hosts.append(address)


def boot(address: str, user_data: str) -> None:
    """What cloud-init does with it."""
    config = yaml.safe_load(user_data)
    keys = "\n".join(config["ssh_authorized_keys"])
    commands = [command if isinstance(command, str) else command[-1] for command in config["runcmd"]]
    run(address, f"cat >>/root/.ssh/authorized_keys <<'E'\n{keys}\nE\n{STUBS}\n" + "\n".join(commands))


def run(address: str, script: str) -> None:
    options = [
        "-i",
        KEY,
        "-o",
        "StrictHostKeyChecking=no",
        "-o",
        "UserKnownHostsFile=/dev/null",
        "-o",
        "LogLevel=ERROR",
        "-o",
        "BatchMode=yes",
    ]
    done = subprocess.run(
        ["ssh", *options, f"root@{address}", "sh -s >/var/log/boot.log 2>&1 </dev/stdin"], input=script, text=True, check=False
    )
    print(address, "booted" if done.returncode == 0 else f"ended with {done.returncode}", flush=True)


clouds = {name: Cloud(**known) for name, known in json.loads(Path(sys.argv[2]).read_text()).items()}


class Api(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        print(format % args, flush=True)

    def answer(self, code: int, content: Any = None) -> None:
        body = b"" if content is None else json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def act(self) -> None:
        path = self.path.partition("?")[0]
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        if path in ("/", "/rented"):
            return self.answer(200, {name: list(cloud.rented.values()) for name, cloud in clouds.items()})
        _, name, *rest = path.split("/")
        cloud, asked = clouds[name], f"{self.command} /{'/'.join(rest)}"
        if asked in ("GET /sold-out", "GET /restocked"):
            cloud.sold_out = asked == "GET /sold-out"
            return self.answer(200)
        if self.headers.get("Authorization") != f"Bearer key of {name}":
            return self.answer(401, {"message": "Unable to authenticate you"})
        return self.ask(cloud, asked, body)

    def ask(self, cloud: Cloud, asked: str, body: dict[str, Any]) -> None:
        if asked == "POST /v2/droplets":
            made = cloud.rent(body)
            return self.answer(202, {"droplet": made}) if made else self.answer(422, {"message": "no capacity"})
        if found := re.fullmatch(r"(GET|DELETE) /v2/droplets/(\d+)", asked):
            if found[2] not in cloud.rented:
                return self.answer(404, {})
            if found[1] == "GET":
                return self.answer(200, {"droplet": cloud.droplet(found[2])})
            cloud.give_back(found[2])
            return self.answer(204)
        if asked == "POST /v2/account/keys":
            cloud.keys.append(body | {"id": len(cloud.keys) + 1})
            return self.answer(201, {"ssh_key": cloud.keys[-1]})
        known = {
            "GET /v2/account": {"account": {}},
            "GET /v2/account/keys": {"ssh_keys": cloud.keys},
            "GET /v2/projects": {"projects": []},
            "GET /v2/sizes": {"sizes": cloud.sizes()},
        }
        return self.answer(200, known[asked]) if asked in known else self.answer(404, {})

    do_GET = do_POST = do_DELETE = act


ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Api).serve_forever()
