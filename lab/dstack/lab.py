"""A dstack server, its CLI and hosts on one Linux machine: everything real but the two agents that dstack installs on hosts, which it
downloads as binaries; in their place stand those of lab/dstack/agents.py.

    with Lab(hosts=2) as lab:
        lab.render(); lab.user("dstack apply -y -d -f build/lab/ray-cluster.dstack.yml")
        lab.wait_run("ray", "running"); lab.hosts[1].power_off(); lab.logs("ray")
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import yaml

from lab.copied import copy_project
from lab.dstack.agents import place_agents
from lab.dstack.hosts import NETWORK, PATH, Host, Laptop, interrupt, sh
from lab.dstack.image import IMAGE, VOLUMES, make_image
from lab.waiting import wait_for

TOOLS = ("dockerd", "docker", "docker-init", "sshd", "ssh", "ssh-keygen", "ip", "curl", "nsenter", "unshare", "setpriv", "sudo")
ENDED = ("done", "failed", "terminated")
FILES_PORT, SERVER = 8199, "http://127.0.0.1:3000"


def lacking() -> str | None:
    """Why there can be no lab on this machine."""
    if sys.platform != "linux":
        return "hosts are made of Linux namespaces"
    if os.geteuid() != 0:
        return "needs root, for namespaces"
    missing = [tool for tool in TOOLS if not shutil.which(tool, path=PATH)]
    return f"lacks {', '.join(missing)}; `make test-hosts` installs them" if missing else None


class Lab:
    """Starts with an idle server; `fleet` makes the hosts known to it."""

    token = "token-of-the-lab"

    def __init__(self, hosts: int = 2, first: int = 1):
        """`first` host's number: labs that live at the same time have others, as a host's containers are in a group of its number."""
        self.count, self.first = hosts, first
        self.folder = Path(tempfile.mkdtemp(prefix="flotilla-"))  # short: it holds sockets
        self.project, self.home, self.shared = self.folder / "project", self.folder / "home", self.folder / "shared"
        # HOME as dstack and ssh expect it; nothing of the environment of these tests.
        self.environment = {"HOME": str(self.home), "PATH": PATH, "LANG": "C.UTF-8", "COLUMNS": "160", "PYTHONUNBUFFERED": "1"}
        self.hosts: list[Host] = []

    def __enter__(self) -> Self:
        try:
            self._up()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        places = [getattr(self, name) for name in ("laptop", "switch") if hasattr(self, name)]
        for machine in (*self.hosts, *{id(place): place for place in places}.values()):
            machine.power_off()
        sh(f"find /sys/fs/cgroup -depth -type d -path '*/flotilla/host*-{os.getpid()}*' -exec rmdir {{}} + 2>/dev/null || true")
        shutil.rmtree(self.folder)

    def _up(self) -> None:
        for folder in (self.project, self.home / ".dstack", self.shared, self.folder / "agents"):
            folder.mkdir(parents=True)
        self.shared.chmod(0o777)
        sh(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / "key")])
        make_image(self.folder / "image.tar")
        copy_project(self.project)
        self._connect()
        self.hosts = [Host(self.first + number, self.folder, self.switch) for number in range(self.count)]
        self._start_files()
        self.start_server()
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(self._ready, self.hosts))
        self.wait_server()

    def _connect(self) -> None:
        """The person's machine, and the switch that the hosts' cables end in: here it is that machine."""
        self.laptop = self.switch = Laptop(self.folder)

    def _ready(self, host: Host) -> None:
        host.ready(self.folder / "image.tar", IMAGE, PATH)

    def power_on(self, index: int) -> None:
        """Boots a host that was powered off."""
        self.hosts[index] = Host(self.first + index, self.folder, self.switch)
        self._ready(self.hosts[index])

    def _start_files(self) -> None:
        """Where hosts download the agents."""
        place_agents(self.folder / "agents")
        command = [
            sys.executable,
            "-m",
            "http.server",
            str(FILES_PORT),
            "--bind",
            self.switch.address,
            "--directory",
            str(self.folder / "agents"),
        ]
        self.files = self.switch.start(*command, cwd=self.folder, environment=self.environment, log=self.folder / "files.log")

    def start_server(self) -> None:
        agents = f"http://{self.laptop.address}:{FILES_PORT}"
        projects = [{"name": "main", "url": SERVER, "token": self.token, "default": True}]
        (self.home / ".dstack/config.yml").write_text(json.dumps({"projects": projects}))
        environment = self.environment | {
            "DSTACK_SERVER_DIR": str(self.folder / "server"),
            "DSTACK_SERVER_ADMIN_TOKEN": self.token,
            "DSTACK_DO_NOT_UPDATE_DEFAULT_PROJECT": "1",
            "DSTACK_DEFAULT_CREDS_DISABLED": "1",
            "DSTACK_SERVER_LOG_FORMAT": "standard",
            "DSTACK_SHIM_DOWNLOAD_URL": f"{agents}/dstack-shim",
            "DSTACK_RUNNER_DOWNLOAD_URL": f"{agents}/dstack-runner",
            "GPUHUNT_CATALOG_URL": f"file://{self.folder}/no-catalog",
        }
        command = ["dstack", "server", "--host", "127.0.0.1", "--port", SERVER.rpartition(":")[2]]
        self.server = self.laptop.start(*command, cwd=self.folder, environment=environment, log=self.folder / "server.log")

    def wait_server(self) -> None:
        def answers() -> bool:
            assert self.server.poll() is None, (self.folder / "server.log").read_text()[-3000:]
            return self.get("/healthcheck").status == 200

        wait_for(f"the dstack server, see {self.folder}/server.log", answers, 400)

    # What a person does

    def stack(self, name: str = "lab", **settings: Any) -> None:
        """Writes stacks/Pulumi.<name>.yaml and renders it: the hosts as an SSH fleet of that name; `settings` in place of its own."""
        ssh = {"user": "root", "identity_file": str(self.folder / "key"), "network": f"{NETWORK}.0/24"}
        fleet = {
            "name": name,
            "cpus": 1,
            "memory": "1GB..",
            "disk": "100MB..",
            "ssh": ssh | {"hosts": [{"hostname": h.address} for h in self.hosts]},
        } | ({"sandboxes": settings.pop("sandboxes")} if "sandboxes" in settings else {})
        task = {"image": IMAGE, "user": "root", "shm_size": "1GB", "volumes": VOLUMES}
        given = {"cloud": "ssh", "fleets": [fleet], "checkpoints": {"kind": "shared", "path": "/mnt/shared"}} | settings
        given["task"] = task | settings.get("task", {})
        file = self.project / f"stacks/Pulumi.{name}.yaml"
        file.write_text(yaml.safe_dump({"config": {f"flotilla:{key}": value for key, value in given.items()}}, sort_keys=False))
        self.must(f"python -m infra.preview {name}")

    def user(self, line: str, timeout: float = 300, **environment: str) -> subprocess.CompletedProcess[str]:
        """A line that a person types in the project's folder, stdout and stderr together."""
        return subprocess.run(
            [*self.laptop.enter, "env", f"--chdir={self.project}", "bash", "-c", line],
            env=self.environment | {"PYTHONPATH": str(self.project)} | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )

    def must(self, line: str, timeout: float = 300) -> str:
        """Output of a line that must succeed."""
        done = self.user(line, timeout)
        assert done.returncode == 0, f"{line}: exit code {done.returncode}\n{done.stdout[-4000:]}"
        return done.stdout

    def start(self, line: str, log: str) -> subprocess.Popen[bytes]:
        """The same in the background; its output goes to the file `log` in the lab's folder."""
        environment = self.environment | {"PYTHONPATH": str(self.project)}
        return self.laptop.start("bash", "-c", f"{line}", cwd=self.project, environment=environment, log=self.folder / log)

    def typed(self, line: str, log: str) -> subprocess.Popen[bytes]:
        """The same on a terminal: what is written to its stdin is what the person types."""
        return subprocess.Popen(
            [*self.laptop.enter, "env", "--default-signal=INT", f"--chdir={self.project}", "script", "-qefc", line, str(self.folder / log)],
            env=self.environment | {"PYTHONPATH": str(self.project)},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    @contextlib.contextmanager
    def attached(self, run: str, port: int = 8265) -> Iterator[subprocess.Popen[bytes]]:
        """`dstack attach` in the background, from when the port answers; Ctrl-C in the end."""
        self.wait_free(port)
        process = self.start(f"exec dstack attach {run}", "attach.log")
        try:
            self.wait_forwarded(port, process)
            yield process
        finally:
            interrupt(process)

    def wait_free(self, port: int) -> None:
        """dstack takes a port for taken until a minute after the last connection to it was closed."""

        def free() -> bool:
            with self.laptop.network(), socket.socket() as probe:
                probe.bind(("", port))
            return True

        wait_for(f"port {port} to be free", free, 120, 0.5)

    def wait_forwarded(self, port: int, process: subprocess.Popen[bytes]) -> None:
        """Until something answers HTTP on this port of the laptop's loopback."""

        def answers() -> bool:
            assert process.poll() is None, (self.folder / "attach.log").read_text()[-3000:]
            return self.get("/", f"http://127.0.0.1:{port}").status in (200, 401)

        wait_for(f"http://127.0.0.1:{port}", answers, 300, 0.5)

    def get(self, path: str, url: str = SERVER) -> Any:
        with self.laptop.network():
            try:
                return urllib.request.urlopen(url + path, timeout=10)
            except urllib.error.HTTPError as error:
                return error

    # What the server knows

    def api(self, path: str, **body: Any) -> Any:
        return self.ask(f"project/main/{path}", **body)

    def ask(self, path: str, **body: Any) -> Any:
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{SERVER}/api/{path}", json.dumps(body).encode(), headers)
        with self.laptop.network(), urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def runs(self) -> list[str]:
        """Those that have not ended."""
        listed = self.ask("runs/list", project_name="main", only_active=True)
        return [run["run_spec"]["run_name"] for run in listed if run["status"] not in ENDED]

    def instances(self, fleet: str = "lab") -> list[str]:
        """States of a fleet's instances."""
        return [instance["status"] for instance in self.api("fleets/get", name=fleet)["instances"]]

    def fleet(self, name: str = "lab", timeout: float = 400) -> None:
        """Applies the rendered fleet and waits until its instances are idle."""
        self.must(f"dstack apply -y -d -f build/{name}/{name}.fleet.dstack.yml")
        wait_for(f"fleet {name} idle", lambda: set(self.instances(name)) == {"idle"}, timeout, 0.5)

    def jobs(self, run: str) -> list[dict[str, Any]]:
        """The newest submission of each job (one per node), with its number among that job's submissions."""
        jobs = self.api("runs/get", run_name=run)["jobs"]
        return [{"submission": len(job["job_submissions"]), **job["job_submissions"][-1]} for job in jobs]

    def status(self, run: str) -> str:
        return self.api("runs/get", run_name=run)["status"]

    def wait_run(self, run: str, *statuses: str, timeout: float = 300) -> str:
        """Until a run has one of these states; running only when all of its jobs are."""

        def reached() -> str:
            status = self.status(run)
            ok = status in statuses and (status != "running" or all(job["status"] == "running" for job in self.jobs(run)))
            assert ok or status not in ENDED, f"{run} is {status}: {self.why(run)}\n{self.logs(run)[-3000:]}"
            return status if ok else ""

        return wait_for(f"run {run} to be {' or '.join(statuses)}", reached, timeout, 0.5)

    def why(self, run: str) -> str:
        """Why the jobs of a run ended, by dstack."""
        return "; ".join(f"{job['exit_status']} {job['termination_reason']}: {job['termination_reason_message']}" for job in self.jobs(run))

    def wait_ready(self, run: str) -> None:
        """Until the head says that its cluster is whole; dstack hands on its words some seconds later."""
        self.wait_run(run, "running")
        wait_for(f"run {run} to be ready", lambda: "ready: " in self.logs(run), 300, 1)

    def host(self, run: str, node: int) -> Host:
        """Where a node of a run is; node 0 is the head."""
        address = self.jobs(run)[node]["job_provisioning_data"]["hostname"]
        return next(host for host in self.hosts if host.address == address)

    def logs(self, run: str, node: int = 0) -> str:
        """As `dstack logs` prints them, which takes a CPU second to start."""
        asked = {"run_name": run, "job_submission_id": self.jobs(run)[node]["id"], "limit": 1000}
        output, answer = b"", {"next_token": None}
        while True:
            answer = self.api("logs/poll", **asked, next_token=answer["next_token"])
            output += b"".join(base64.b64decode(line["message"]) for line in answer["logs"])
            if not answer["next_token"]:
                return output.decode(errors="replace")

    def stop(self, run: str) -> None:
        self.must(f"dstack stop -y {run}")
        self.wait_run(run, *ENDED, timeout=400)

    def tidy(self) -> None:
        """Every host on and reached, no run left, the stack as it was first."""
        for index, host in enumerate(self.hosts):
            if host.process.poll() is not None:
                self.power_on(index)
            host.link(up=True)
        for run in self.runs():
            self.must(f"dstack stop -y {run}")
        self.wait_idle(timeout=300)
        self.stack()

    def wait_idle(self, fleet: str = "lab", timeout: float = 300) -> None:
        """Until the hosts are free again, and no container is left on them."""
        wait_for(f"fleet {fleet} idle", lambda: set(self.instances(fleet)) == {"idle"}, timeout, 0.5)
        wait_for("containers gone", lambda: not any(host.containers() for host in self.hosts), timeout, 0.5)
