#!/usr/bin/env python3
"""Stands in for dstack-shim, which dstack installs on a host: starts and ends containers. The part of its API that SSH fleets use."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import urllib.request
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

VERSION = "0.22.5"
HOME = Path(os.environ.get("DSTACK_SHIM_HOME", "/root/.dstack"))
RUNNER = Path(os.environ.get("DSTACK_RUNNER_BINARY_PATH", "/usr/local/bin/dstack-runner"))
PORT = int(os.environ.get("DSTACK_SHIM_HTTP_PORT", "10998"))
RUNNER_PORT, SSH_PORT = os.environ.get("DSTACK_RUNNER_HTTP_PORT", "10999"), os.environ.get("DSTACK_RUNNER_SSH_PORT", "10022")
CAP_SYS_RESOURCE = 24  # capabilities(7)
LABEL = "dstack.task"
ADDED = " # added by dstack-shim\n"
keys_lock = threading.Lock()


@dataclass
class Task:
    """One container."""

    id: str
    name: str
    status: str = "preparing"
    termination_reason: str = ""
    termination_message: str = ""
    container: str = ""

    def end(self, reason: str = "", message: str = "") -> None:
        self.status, self.termination_reason, self.termination_message = "terminated", reason, message

    def shown(self) -> dict[str, Any]:
        told = {key: getattr(self, key) for key in ("id", "status", "termination_reason", "termination_message")}
        return told | {"ports": [], "image_pull_progress": None}


tasks: dict[str, Task] = {}


def docker(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False)


def host_info() -> dict[str, Any]:
    """What the server reads once, to know the host's size and addresses."""
    interfaces = json.loads(subprocess.check_output(["ip", "-j", "addr"], text=True))
    addresses = [f"{known['local']}/{known['prefixlen']}" for each in interfaces if each["ifname"] != "lo" for known in each["addr_info"]]
    memory = re.search(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text())
    disk = os.statvfs("/var/lib/docker")
    return {
        "gpu_vendor": "none",
        "gpu_name": "",
        "gpu_memory": 0,
        "gpu_count": 0,
        "addresses": addresses,
        "disk_size": disk.f_bavail * disk.f_bsize,
        "cpus": os.cpu_count(),
        "memory": int(memory[1]) * 1024 if memory else 0,
    }


def run(task: Task, config: dict[str, Any]) -> None:
    """Pulls, creates, starts, and waits for the end."""
    user, keys = config["host_ssh_user"], config["host_ssh_keys"] or []
    try:
        image = config["image_name"] if ":" in config["image_name"] else f"{config['image_name']}:latest"
        task.status = "pulling"
        if docker("image", "inspect", image).returncode or image.endswith(":latest"):
            pulled = docker("pull", image)
            if pulled.returncode:
                return task.end("creating_container_error", f"pullImage error: {pulled.stderr[-300:]}")
        task.status = "creating"
        authorize(user, add=keys)
        made = docker(*creation(task, config, image))
        if made.returncode:
            return task.end("creating_container_error", made.stderr[-300:])
        task.container, task.status = made.stdout.strip(), "running"
        docker("start", task.container)
        wait(task)
    except Exception as error:  # as the real one reports whatever happens to it
        task.end("executor_error", repr(error))
    finally:
        authorize(user, remove=keys)


def creation(task: Task, config: dict[str, Any], image: str) -> list[str]:
    """Arguments of `docker` for the container, in which the runner is the first process."""
    shared = HOME / "runners" / task.name
    shared.mkdir(parents=True, exist_ok=True)
    for mount in config["instance_mounts"]:
        if not (folder := Path(mount["instance_path"])).exists():
            folder.mkdir(parents=True)
            folder.chmod(0o777)
    runner = ["/usr/local/bin/dstack-runner", "--log-level", "5", "start", "--temp-dir", "/tmp/runner", "--http-address", "localhost"]
    runner += ["--http-port", RUNNER_PORT, "--ssh-port", SSH_PORT]
    runner += [word for key in config["container_ssh_keys"] for word in ("--ssh-authorized-key", f"'{key}'")]
    arguments = ["create", "--label", f"{LABEL}={task.id}", "--name", task.name, "--network", config["network_mode"]]
    arguments += ["--user", config["container_user"], "--entrypoint", "/bin/sh"]
    arguments += ["-v", f"{shared}:/tmp/runner", "-v", f"{RUNNER}:/usr/local/bin/dstack-runner"]
    arguments += privileged() if config["privileged"] else []
    arguments += ["--tmpfs", f"/dev/shm:exec,size={config['shm_size']}"] if config["shm_size"] else []
    arguments += ["--memory", str(config["memory"])] if config["memory"] else []
    arguments += [word for mount in config["instance_mounts"] for word in ("-v", f"{mount['instance_path']}:{mount['path']}")]
    return [*arguments, image, "-c", f"if ! command -v sshd >/dev/null; then echo no sshd; exit 11; fi && {' '.join(runner)}"]


def privileged() -> list[str]:
    """All rights; where this host has not all of them itself, as in a container, what it has: Docker's own flag then starts nothing."""
    bounding = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapBnd:"))
    if int(bounding.split()[1], 16) >> CAP_SYS_RESOURCE & 1:
        return ["--privileged"]
    options = ["seccomp=unconfined", "systempaths=unconfined"]
    return ["--cap-add=ALL", "--cap-drop=SYS_RESOURCE", *(f"--security-opt={option}" for option in options)]


def wait(task: Task) -> None:
    code = docker("wait", task.container).stdout.strip()
    if task.status == "terminated":
        return
    if code == "0":
        task.end("done_by_runner")
    else:
        logs = docker("logs", "--tail", "5", task.container)
        task.end("container_exited_with_error", logs.stdout + logs.stderr)


def authorize(user: str, add: list[str] | None = None, remove: list[str] | None = None) -> None:
    """Keys of the people who attach, for as long as the task runs."""
    file = Path(os.path.expanduser(f"~{user}")) / ".ssh/authorized_keys"  # noqa: PTH111 - of another user
    with keys_lock:
        changed = {key + ADDED for key in [*(add or []), *(remove or [])]}
        kept = [line for line in file.read_text().splitlines(keepends=True) if line not in changed]
        file.write_text("".join(kept + [key + ADDED for key in add or []]))


def resume() -> None:
    """Containers that an earlier shim of this host started."""
    for container in docker("ps", "--all", "--quiet", "--filter", f"label={LABEL}").stdout.split():
        about = json.loads(docker("inspect", container).stdout)[0]
        task = Task(about["Config"]["Labels"][LABEL], about["Name"][1:], "running", container=container)
        tasks[task.id] = task
        threading.Thread(target=wait, args=(task,), daemon=True).start()


def terminate(task: Task, body: dict[str, Any]) -> None:
    running, reason = task.status == "running", (body.get("termination_reason", ""), body.get("termination_message", ""))
    task.end(*reason)
    if running:
        docker("stop", "--time", str(body.get("timeout", 10)), task.container)


def remove(task: Task) -> None:
    if task.container:
        docker("rm", "--force", "--volumes", task.container)
    shutil.rmtree(HOME / "runners" / task.name, ignore_errors=True)
    del tasks[task.id]


class Api(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        print("shim", format % args, flush=True)

    def answer(self, code: int, content: Any = None) -> None:
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        components = [{"name": name, "version": VERSION, "status": "installed"} for name in ("dstack-runner", "dstack-shim")]
        known = {
            "/api/healthcheck": {"service": "dstack-shim", "version": VERSION},
            "/api/instance/health": {"dcgm": None},
            "/api/instance/info": {},
            "/api/components": {"components": components},
            "/api/tasks": {"tasks": [{"id": task.id, "status": task.status} for task in tasks.values()]},
        } | {f"/api/tasks/{task.id}": task.shown() for task in tasks.values()}
        self.answer(200, known[path]) if path in known else self.answer(404, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        if self.path == "/api/tasks":
            return self.submit(body)
        asked = re.fullmatch(r"/api/tasks/([^/]+)/(terminate|remove)", self.path)
        task = tasks.get(asked[1]) if asked else None
        if asked and task:
            if asked[2] == "terminate":
                terminate(task, body)
                return self.answer(200, task.shown())
            remove(task)
            return self.answer(200)
        return self.answer(200 if self.path in ("/api/components/install", "/api/shutdown") else 404)

    def submit(self, config: dict[str, Any]) -> None:
        if config["id"] in tasks:
            return self.answer(409, {})
        task = tasks[config["id"]] = Task(config["id"], f"{config['name']}-{config['id'][:8]}")
        threading.Thread(target=run, args=(task, config), daemon=True).start()
        return self.answer(200, task.shown())


def main() -> None:
    if "--version" in sys.argv:
        return print("dstack-shim version", VERSION)
    HOME.mkdir(parents=True, exist_ok=True)
    if not RUNNER.exists():
        draft = RUNNER.with_suffix(".part")
        draft.write_bytes(urllib.request.urlopen(os.environ["DSTACK_RUNNER_DOWNLOAD_URL"], timeout=60).read())
        draft.chmod(0o755)
        draft.rename(RUNNER)
    subprocess.run(["docker", "info"], check=True, stdout=subprocess.DEVNULL)
    if os.environ.get("DSTACK_SERVICE_MODE") and not (HOME / "host_info.json").exists():
        (HOME / "host_info.json").write_text(json.dumps(host_info()))
    resume()
    return ThreadingHTTPServer(("localhost", PORT), Api).serve_forever()


if __name__ == "__main__":
    main()
