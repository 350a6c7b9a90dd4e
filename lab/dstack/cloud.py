"""A lab whose nodes nobody reaches but their control node: a laptop without a network, a private network, the sessions of a cloud.

    with CloudLab(hosts=1) as lab:
        lab.boot_control()
        lab.start(lab.forward, "forward.log"); lab.must("python -m fleets.server login cloud")

The control node boots what Pulumi renders; in place of the cloud's part of it stands lab/dstack/played/control.sh.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import socket
import sys
import threading
from pathlib import Path

from infra import control
from lab.dstack.hosts import NETWORK, PATH, Host, Laptop, Machine, sh
from lab.dstack.lab import FILES_PORT, Lab
from lab.waiting import wait_for
from stacks.load import load
from stacks.places.place import SERVER_PORT
from stacks.site import Site

HERE = Path(__file__).parent / "played"
STACK = "cloud"
PORTS = (22, SERVER_PORT)
FIRST = 40  # number of the first control node; the next has the next


def lacking() -> str | None:
    """Why this machine lends no disks."""
    if not shutil.which("losetup") or not shutil.which("mkfs.ext4") or not Path("/dev/loop-control").exists():
        return "the control node's disk is a loop device, which this machine does not have"
    return None


class CloudLab(Lab):
    """`forward` is the command that leaves the server's port here, `login` the next, as `pulumi up` prints them."""

    def _connect(self) -> None:
        self.switch = Laptop(self.folder, "switch")
        self.laptop = Machine("laptop", 0, self.folder, "sleep", "infinity", options=["--mount-proc"], environment={"PATH": PATH})
        self.laptop.boot()
        self.laptop.sh("ip link set lo up")
        self.ssm = self.shared / "ssm"
        self.ssm.mkdir()
        self.environment |= {"FLOTILLA_SSM": str(self.ssm), "PATH": f"{HERE}:{PATH}"}
        (self.ssm / "token").write_text(self.token)
        self.controls: list[Host] = []
        with (self.folder / "disk").open("wb") as image:
            image.truncate(300 << 20)
        self.disk = sh(["losetup", "-f", "--show", str(self.folder / "disk")]).strip()

    def __exit__(self, *_: object) -> None:
        for machine in getattr(self, "controls", []):
            machine.power_off()
        if hasattr(self, "disk"):
            sh(["losetup", "-d", self.disk])
        super().__exit__()

    def start_server(self) -> None:
        """It is the control node's, which a test boots."""
        (self.project / f"stacks/Pulumi.{STACK}.yaml").write_text(
            json.dumps(
                {
                    "config": {
                        "flotilla:cloud": "aws",
                        "flotilla:region": "us-east-1",
                        "flotilla:network": {"cidr": f"{NETWORK}.0/24"},
                        "flotilla:fleets": [{"name": "gpus", "machine": "g6.8xlarge", "nodes": 1}],
                        "flotilla:checkpoints": {"kind": "bucket"},
                        "flotilla:dstack": {"host": "cloud"},
                    }
                }
            )
        )
        plan = json.loads(self.must(f"python -m infra.preview {STACK} --json --no-prices"))
        self.forward, self.login = (line.replace("flotilla ", "python -m cli ", 1) for line in plan["outputs"]["next"][:2])
        self.instance = plan["outputs"]["cloud"]["control"]

    def wait_server(self) -> None:
        """It answers once somebody forwards it."""

    def boot_control(self) -> Host:
        """A new machine with the disk of the one before, which has to be off; it runs what a real one runs at first boot."""
        node = Host(FIRST + len(self.controls), self.folder, self.switch)
        self.controls.append(node)
        with self.switch.network():
            wait_for(f"SSH on {node.name}", lambda: socket.create_connection((node.address, 22), 1), 180).close()
        agents = f"http://{self.switch.address}:{FILES_PORT}"
        settings = {
            "DSTACK_SHIM_DOWNLOAD_URL": f"{agents}/dstack-shim",
            "DSTACK_RUNNER_DOWNLOAD_URL": f"{agents}/dstack-runner",
            "GPUHUNT_CATALOG_URL": f"file://{self.folder}/no-catalog",
        }
        known = {"device": self.disk, "secret": "/mnt/shared/ssm/token", "instance": self.instance}
        known["environment"] = "\n".join(f"{key}={value}" for key, value in settings.items())
        user_data = control.script(load(STACK, self.project), Site(), HERE / "control.sh", known)
        (self.shared / "user-data").write_text(user_data)
        node.sh(f"ln -s {shlex.quote(sys.prefix)} /opt/flotilla")  # there is no index to install from
        node.sh("bash /mnt/shared/user-data >/var/log/user-data.log 2>&1 || { cat /var/log/user-data.log; exit 1; }")
        self._sessions(node)
        return node

    def lose_control(self) -> None:
        """The power cord; the disk stays."""
        self.controls[-1].power_off()

    def _sessions(self, node: Host) -> None:
        """The cloud's side of sessions: to loopback of the machine, whatever its network lets in."""
        for port in PORTS:
            place = self.ssm / f"{self.instance}.{port}"
            place.unlink(missing_ok=True)
            server = socket.socket(socket.AF_UNIX)
            server.bind(str(place))
            server.listen()
            threading.Thread(target=self._serve, args=(server, node, port), daemon=True).start()

    def _serve(self, server: socket.socket, node: Host, port: int) -> None:
        while True:
            here, _ = server.accept()
            try:
                with node.network():
                    there = socket.create_connection(("127.0.0.1", port))
            except OSError:  # the machine is off, or nobody listens there
                here.close()
                continue
            for ends in ((here, there), (there, here)):
                threading.Thread(target=_copy, args=ends, daemon=True).start()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
