"""Ray on this node: its command, its process, its last words."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from . import identity, nvlink
from .dashboard import FLEET
from .lifeline import die_with_parent
from .monitoring.programs import ray_environment
from .network import interfaces
from .ports import free_port, port_answers
from .service import environment
from .settings import Settings

RAY_STOP_SECONDS = 8
NODE_GPUS = "FLOTILLA_NODE_GPUS"  # for jobs that check: GPUs of each node in order of rank, where nodes are not alike
# Beside those of the head, and 10002 to 19999, which Ray gives to workers.
PINNED_PORTS = {"--node-manager-port": 6380, "--object-manager-port": 6381, "--runtime-env-agent-port": 6382}
PINNED_PORTS |= {"--dashboard-agent-grpc-port": 6383, "--metrics-export-port": 6384}
ROUTES = "FLOTILLA_ROUTES"  # for jobs that answer on the dashboard's port: the folder of their files for identity.py
RAY_DEFAULTS = {  # where the environment does not say otherwise
    "RAY_AUTH_MODE": "disabled",  # left out, Ray decides by whether ~/.ray/auth_token happens to exist, and not alike on all nodes
    "RAY_USAGE_STATS_ENABLED": "0",
    # A raylet that was killed refuses its health checks and is DEAD after 5 of them: 2.5 s, by default 15 s. A slow network still
    # has 5 x 10 s, since checks that are not answered run into their own timeout.
    "RAY_health_check_period_ms": "500",
    "PYTHONUNBUFFERED": "1",  # the output of jobs reaches `ray job logs` as it is written
}
RAY_PART = re.compile(r"END (\w+)\.\w+ tail \(exit code\(s\)=(.*)\) -----")  # how Ray says which of its processes died
RAYLET = re.compile(rb"--node_id=([0-9a-f]+)")  # in the command line of Ray's process for the node
RAY_NOISE = re.compile(r"state-dump|(Queueing|Execution) time|(Event|Global) stats|grpc_(client|server)|^\s*$|will be killed")

log = logging.getLogger(__name__)


def ray_command(settings: Settings, domain: str | None = None) -> list[str]:
    """`ray start` for this node, whose GPUs are in that NVLink domain.

    Ports that only this node's own processes use are left to the kernel: nodes may share a machine.
    """
    head, own = settings.addresses[0], settings.addresses[settings.rank]
    flags: dict[str, Any] = {"--node-ip-address": own, "--num-cpus": settings.num_cpus, "--dashboard-agent-listen-port": 0}
    if settings.rank == 0:
        flags |= {"--port": settings.port, "--dashboard-host": "127.0.0.1", "--dashboard-port": settings.ray_dashboard_port}
        # Ray always starts its client server, which nothing here uses: any free port instead of 10001, which another Ray may have.
        flags |= {"--include-dashboard": "true", "--ray-client-server-port": free_port()}
    else:
        flags |= {"--address": f"[{head}]:{settings.port}" if ":" in head else f"{head}:{settings.port}"}
    flags |= PINNED_PORTS if settings.pin_ports else {}
    flags |= {"--num-gpus": 0 if settings.gpus == 0 else settings.num_gpus, "--resources": settings.resources or None}
    flags |= {"--object-store-memory": settings.object_store_mb and settings.object_store_mb * 2**20, "--temp-dir": settings.temp_dir}
    flags |= {"--object-spilling-directory": settings.spill}
    labels = {"flotilla.role": "rollout", FLEET: settings.fleet} if settings.join else {}
    labels |= {nvlink.LABEL: domain} if domain else {}
    flags |= {"--labels": ",".join(f"{key}={value}" for key, value in labels.items()) or None}
    given = [f"{name}={value}" for name, value in flags.items() if value is not None]
    return ["ray", "start", "--block", "--log-color=false", *(["--head"] if settings.rank == 0 else []), *given]


@dataclass(frozen=True)
class Ray:
    """`ray start --block` on this node, and what it prints."""

    process: subprocess.Popen[bytes]
    output: IO[bytes]
    front: subprocess.Popen[bytes] | None = None  # on the head: identity.py, on the dashboard's port

    def ended(self) -> str | None:
        """None while it runs; else its exit code and last words."""
        if self.process.poll() is None:
            code = self.front.poll() if self.front else None
            return None if code is None else f"what listens on the dashboard's port ended with code {code}: {self._text().strip()[-300:]}"
        text = self._text()
        died = dict(RAY_PART.findall(text))
        who = ": " + ", ".join(f"{part} {code}" for part, code in died.items()) if died else f" with code {self.process.returncode}:"
        lines = [line for line in text.splitlines() if not RAY_NOISE.search(line)][-12:]
        return "\n".join([f"Ray ended on this node{who}", *lines])

    def node_id(self) -> str | None:
        """What Ray calls this node; None before its raylet has started. Ray tells it only to processes that it has connected."""
        own = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        with contextlib.suppress(OSError):  # one of them has ended meanwhile
            for child in own.read_text().split():
                if found := RAYLET.search(Path(f"/proc/{child}/cmdline").read_bytes()):
                    return found[1].decode()
        return None

    def _text(self) -> str:
        self.output.seek(0)
        return self.output.read().decode(errors="replace")


@contextlib.contextmanager
def ray_node(settings: Settings) -> Iterator[Ray]:
    """Runs Ray on this node inside the `with`. Ends it and nothing else on the way out."""
    stop_wait = {"RAY_JOB_STOP_WAIT_TIME_S": str(settings.stop_timeout)}
    of_services = environment(settings.services, settings.rank, settings.addresses)
    env = RAY_DEFAULTS | stop_wait | interfaces(settings.addresses[settings.rank]) | of_services | os.environ
    if settings.node_gpus:
        env[NODE_GPUS] = ",".join(map(str, settings.node_gpus))
    if settings.rank == 0:  # what jobs print of the dashboard: the port that is forwarded, not Ray's own behind it
        env.setdefault("RAY_OVERRIDE_DASHBOARD_URL", f"http://127.0.0.1:{settings.dashboard_port}")
        env = ray_environment(settings.monitoring) | env | {ROUTES: str(settings.routes)}
    with tempfile.TemporaryFile() as output, identity_front(settings, output) as front:
        process = spawn(ray_command(settings, nvlink.domain() if settings.gpus != 0 else None), env, output)
        try:
            yield Ray(process, output, front)
        finally:
            # Else there is nobody whom Ray could say goodbye to, and it would only hang.
            if port_answers(settings.addresses[0], settings.port):
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(RAY_STOP_SECONDS)
            with contextlib.suppress(ProcessLookupError):  # nothing is left of the group, which is how it should be
                os.killpg(process.pid, signal.SIGKILL)
            try:
                process.wait(RAY_STOP_SECONDS)
            except subprocess.TimeoutExpired:  # the kernel holds it, as on a file system that hangs
                log.error("Ray, pid %d, was killed but has not ended within %d s", process.pid, RAY_STOP_SECONDS)


@contextlib.contextmanager
def identity_front(settings: Settings, output: IO[bytes]) -> Iterator[subprocess.Popen[bytes] | None]:
    """What says whose cluster this is, on the head's dashboard port, inside the `with`."""
    if settings.rank != 0:
        yield None
        return
    program = [sys.executable, "-I", "-B", str(Path(__file__).with_name("identity.py"))]
    ports = ["--listen", str(settings.dashboard_port), "--ray", str(settings.ray_dashboard_port)]
    env = {name: value for name, value in os.environ.items() if name != identity.TOKEN}
    token = {identity.TOKEN: settings.dashboard.token} if settings.dashboard.token else {}
    gate = ["--gate", str(settings.gate)] if any(service.port for service in settings.services) else []
    routes = ["--routes", str(settings.routes)]
    front = spawn([*program, *ports, "--stack", settings.stack, *gate, *routes], env | token, output)
    try:
        yield front
    finally:
        front.kill()
        front.wait()


def spawn(command: list[str], env: dict[str, str], output: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
    """Starts a process that ends with the agent, however that ends; Ray does the same to its own children.

    With `output` they get neither our terminal nor any other open file: dstack waits for whoever holds those. They ignore SIGUSR1,
    which Slurm may send to all processes of a node; it means the agent, and jobs that handle it.
    """

    def prepare() -> None:  # between fork and exec
        die_with_parent()
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    return subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        preexec_fn=prepare,  # noqa: PLW1509 - the agent has no threads
    )
