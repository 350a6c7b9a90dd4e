"""A lab with two clouds: dstack's server asks their APIs for machines, and gets hosts of this machine.

    with Market(hosts={"digitalocean": 1, "amddevcloud": 1}) as lab:
        lab.stack("market", cloud="dstack", backends=["digitalocean", "amddevcloud"]); lab.serve("market")

The two clouds speak the same API, which lab/dstack/played/droplets.py answers as both, each with its own hosts and prices. The server is
started by `python -m fleets.server up`, with the keys of both in its environment.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from lab.dstack.image import IMAGE, VOLUMES
from lab.dstack.lab import FILES_PORT, Lab
from lab.waiting import wait_for

HERE = Path(__file__).parent / "played"
PORT = 8198
KEYS = {"digitalocean": "DIGITALOCEAN_ACCESS_TOKEN", "amddevcloud": "AMD_DEVCLOUD_API_KEY"}
URLS = {"digitalocean": "https://api.digitalocean.com", "amddevcloud": "https://api.devcloud.amd.com"}


class Anywhere(Lab):
    """Stacks of the place `dstack`; the server comes with a stack, by `serve`."""

    redirected = ""  # a folder that the server's Python starts with

    def __init__(self, hosts: int, first: int, backends: Sequence[Any], checkpoints: dict[str, Any]):
        super().__init__(hosts, first)
        self.backends, self.checkpoints = backends, checkpoints

    def start_server(self) -> None:
        agents = f"http://{self.laptop.address}:{FILES_PORT}"
        self.environment |= {
            "DSTACK_SHIM_DOWNLOAD_URL": f"{agents}/dstack-shim",
            "DSTACK_RUNNER_DOWNLOAD_URL": f"{agents}/dstack-runner",
            "GPUHUNT_CATALOG_URL": f"file://{self.folder}/no-catalog",
            "DSTACK_DEFAULT_CREDS_DISABLED": "1",
        }

    def stack(self, name: str = "market", **settings: Any) -> None:
        """Renders one of a small machine of these backends."""
        task = {"image": IMAGE, "user": "root", "shm_size": "1GB", "volumes": VOLUMES}
        machine = {"name": name, "nodes": 1, "cpus": 1, "memory": "1GB..", "disk": "1GB.."}
        given = {"cloud": "dstack", "backends": list(self.backends), "fleets": [machine], "checkpoints": self.checkpoints}
        given |= settings | {"task": task | settings.get("task", {})}
        file = self.project / f"stacks/Pulumi.{name}.yaml"
        file.write_text(yaml.safe_dump({"config": {f"flotilla:{key}": value for key, value in given.items()}}, sort_keys=False))
        self.must(f"python -m infra.preview {name}")

    def serve(self, name: str) -> str:
        """The server of a stack, as a person starts it; what that printed."""
        path = f"PYTHONPATH={self.redirected}:{self.project}"
        said = self.must(f"{path} python -m fleets.server up {name} && python -m fleets.server login")
        self.token = (self.project / "build/server/token").read_text().strip()
        return said


class Market(Anywhere):
    """`hosts` of each cloud; the prices are one and two USD an hour, in this order. Checkpoints in a folder of the machine."""

    redirected = str(HERE / "redirected")

    def __init__(self, hosts: dict[str, int]):
        super().__init__(sum(hosts.values()), 21, list(hosts), {"path": "/mnt/shared"})
        self.wanted = hosts

    def start_server(self) -> None:
        """The clouds."""
        super().start_server()
        api = f"http://127.0.0.1:{PORT}"
        free, clouds = [host.address for host in self.hosts], {}
        for price, (cloud, count) in enumerate(self.wanted.items(), 1):
            clouds[cloud] = {"price": price, "hosts": [free.pop(0) for _ in range(count)]}
        (self.folder / "clouds.json").write_text(json.dumps(clouds))
        command = ["python", str(HERE / "droplets.py"), str(PORT), str(self.folder / "clouds.json"), str(self.folder / "key")]
        self.clouds = self.laptop.start(*command, cwd=self.folder, environment=self.environment, log=self.folder / "clouds.log")
        self.environment["FLOTILLA_CLOUDS"] = json.dumps({url: f"{api}/{cloud}" for cloud, url in URLS.items()})
        self.environment |= {variable: f"key of {cloud}" for cloud, variable in KEYS.items()}

    def wait_server(self) -> None:
        wait_for("the clouds", lambda: self.get("/", f"http://127.0.0.1:{PORT}").status == 200, 180)

    def rented(self) -> dict[str, list[str]]:
        """Addresses of the machines that each cloud has lent out."""
        return json.load(self.get("/rented", f"http://127.0.0.1:{PORT}"))

    def sell_out(self, cloud: str) -> None:
        """It has no machine for who asks from now on."""
        self.get(f"/{cloud}/sold-out", f"http://127.0.0.1:{PORT}")

    def restock(self, cloud: str) -> None:
        self.get(f"/{cloud}/restocked", f"http://127.0.0.1:{PORT}")

    def reclaim(self, cloud: str) -> None:
        """It takes all of its machines away, and has no more."""
        for host in self.hosts:
            if host.address in self.rented()[cloud]:
                host.power_off()
        self.sell_out(cloud)
