"""The node agent: what every node of a Ray cluster runs, whoever scheduled it. Standard library alone; needs `ray` on PATH.

    python3 node.py                            hold the cluster until a signal comes or a node is lost
    python3 node.py --job 'python train.py'    run one Ray job on it and end with the job's exit code
    python3 node.py --torchrun train.py        no Ray: become this node's torchrun

Which node this is comes from --rank and --addresses, else from dstack (DSTACK_NODE_RANK, DSTACK_NODES_IPS), else from Slurm
(SLURMD_NODENAME, and SLURM_JOB_NODELIST or, in containers, which have no scontrol, FLOTILLA_NODES). Rank 0 is the head: its
dashboard, which is also the job API, listens on loopback, so that only who can log in reaches it. Flags may also stand in
FLOTILLA_NODE_ARGS.

Exit codes, of which 75 to 77 are worth another try:
    0    a signal ended a held cluster; or the job succeeded, on all nodes
    2    a setting is wrong
    75   a node was lost and did not return; on a worker: the head is gone, or this node is cut off from it
    76   the nodes did not come together in time
    77   Ray could not be started here, or ended on the head
    else the job's own code; 128 + N where signal N ended the job or this agent while its job ran
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import fcntl
import http.client
import ipaddress
import json
import logging
import os
import re
import select
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NoReturn

NODE_LOST, NOT_READY, RAY_FAILED = 75, 76, 77
HEAD_GONE_SECONDS = 12  # its port refuses for so long: it has ended. Longer than its Ray takes to stop, after which it says farewell
PROBE_SECONDS = 3  # within which a host answers that is there
BLAME_SECONDS = 5  # after a job failed, within which a node's loss is known that may be the cause
FAREWELL, FAREWELL_SECONDS = b"flotilla: the job is done", 5  # what workers hear on Ray's port, to tell an end from a death
LOST_SAVE_SECONDS = 5  # for jobs after a node was lost: those that need it cannot save, and the next attempt waits
NOTICE_SECONDS = 5  # between two looks for a spot machine's notice, which comes two minutes ahead on AWS, half a minute on GCP
FULL = 0.01  # of a disk is left
RAY_STOP_SECONDS = 8
SUBMIT_SECONDS = 300  # to upload the working directory and be accepted
SCONTROL_SECONDS = 30  # slurmctld may be busy
CLOCK_SECONDS = 30  # by which clocks may differ; a node is seen some seconds after it started
# Beside those of the head, and 10002 to 19999, which Ray gives to workers.
PINNED_PORTS = {"--node-manager-port": 6380, "--object-manager-port": 6381, "--runtime-env-agent-port": 6382}
PINNED_PORTS |= {"--dashboard-agent-grpc-port": 6383, "--metrics-export-port": 6384}
STEADY_SECONDS = 40  # Ray gives up joining earlier than that, so what has run for longer had joined

RAY_DEFAULTS = {  # where the environment does not say otherwise
    "RAY_AUTH_MODE": "disabled",  # left out, Ray decides by whether ~/.ray/auth_token happens to exist, and not alike on all nodes
    "RAY_USAGE_STATS_ENABLED": "0",
    # A raylet that was killed refuses its health checks and is DEAD after 5 of them: 2.5 s, by default 15 s. A slow network still
    # has 5 x 10 s, since checks that are not answered run into their own timeout.
    "RAY_health_check_period_ms": "500",
    "PYTHONUNBUFFERED": "1",  # the output of jobs reaches `ray job logs` as it is written
}
RAY_PART = re.compile(r"END (\w+)\.\w+ tail \(exit code\(s\)=(.*)\) -----")  # how Ray says which of its processes died
RAY_NOISE = re.compile(r"state-dump|(Queueing|Execution) time|(Event|Global) stats|grpc_(client|server)|^\s*$|will be killed")
ALONE = "127.0.0.2"  # a node that is alone; Ray would replace 127.0.0.1 by an address of its own choice
SIOCGIFADDR = 0x8915  # netdevice(7)
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None

log = logging.getLogger("node")
signals: list[int] = []  # that have come, in order


class Failure(Exception):
    """Ends the agent with `code` and one line of explanation."""

    def __init__(self, code: int, message: str):
        super().__init__(message)
        self.code = code


class Reclaimed(Failure):
    """A cloud takes one of the machines back, but not yet: jobs can save."""


class HeadEnded(Exception):
    """The head has said farewell."""


class Stopped(Exception):
    """A signal asked the agent to end."""


# Settings


class Settings(argparse.Namespace):
    """The flags of `read_settings`, and what was found out about this node."""

    rank: int
    addresses: list[str]  # of all nodes, in order of rank
    gpus: int | None  # expected on each node; None: as many as there are
    node_gpus: list[int] | None  # expected on each node where they are not alike, in order of rank
    patience: int  # seconds that a lost node has to return
    dashboard: Dashboard  # the head's, as the head itself reaches it


def read_settings(argv: list[str], env: Mapping[str, str]) -> Settings:
    """Raises ValueError where it does not know which node this is, or a setting is wrong."""
    parser = argparse.ArgumentParser(prog="node.py", description="Starts this node of a Ray cluster.")
    add = parser.add_argument
    add("--rank", type=int, help="0 is the head")
    add("--addresses", type=lambda text: text.split(","), help="addresses of all nodes in order of rank, with commas")
    add("--network", type=ipaddress.ip_network, help="CIDR; nodes talk to one another on their address in it")
    add("--num-cpus", type=int, help="CPUs that Ray offers; default: all")
    add("--node-gpus", type=lambda text: [int(n) for n in text.split(",")], help="GPUs of each node in order of rank, with commas")
    add("--num-gpus", type=int, help="GPUs that Ray offers; default: all")
    add("--resources", default="", help='custom Ray resources of this node, such as {"v100": 8}')
    add("--host-resources", default="", help='the same of single nodes, by address, such as {"10.0.0.5": {"v100": 8}}')
    add("--object-store-mb", type=int, help="size of the object store; default: 30 %% of memory")
    add("--port", type=int, default=6379, help="of the head, for the other nodes")
    add("--dashboard-port", type=int, default=8265)
    add("--pin-ports", action="store_true", help="give Ray's other ports fixed numbers too, for firewalls; needs a node of its own")
    add("--temp-dir", help="Ray's folder for sockets and logs; keep it short")
    add("--join-timeout", type=int, default=600, help="seconds that nodes wait for one another")
    add("--rejoin-timeout", type=int, default=20, help="seconds within which a lost node must be back, with --on-node-loss fail")
    add("--on-node-loss", choices=["fail", "wait"], default="fail", help="wait: give a lost node as long as --join-timeout")
    add("--stop-timeout", type=int, default=120, help="seconds that a stopped job has to save a checkpoint")
    add("--per-host", action="store_true", help="checkpoints are in a folder of each host: say where those of the run before are")
    add("--spot", choices=["aws", "gcp"], help="whose metadata service says that a spot machine is taken back")
    add("--job", help="command of a Ray job")
    add("--working-dir", help="of the job; uploaded to all nodes")
    add("--runtime-env", help="file with the Ray runtime environment of the job")
    add("--torchrun", help="arguments of torchrun, which then runs in place of Ray; --port is where its ranks meet")
    add("--when-ready", help="text to print when the cluster is ready, such as how to reach its dashboard")
    settings = parser.parse_args(shlex.split(env.get("FLOTILLA_NODE_ARGS", "")) + argv, namespace=Settings())
    resources, of_hosts = json_flag("--resources", settings.resources), json_flag("--host-resources", settings.host_resources)
    settings.dashboard = Dashboard(f"http://127.0.0.1:{settings.dashboard_port}", ray_token(env))
    rank, addresses, gpus = who_am_i(settings, env)
    if not 0 <= rank < len(addresses):
        raise ValueError(f"rank {rank} is out of range for {len(addresses)} addresses: {', '.join(addresses)}")
    if settings.network and ipaddress.ip_address(addresses[rank]) not in settings.network:
        raise ValueError(f"address {addresses[rank]} of rank {rank} is not in --network {settings.network}")
    settings.rank, settings.addresses = rank, addresses
    if addresses[rank] in of_hosts:
        settings.resources = json.dumps(resources | of_hosts[addresses[rank]])
    settings.gpus = gpus if settings.num_gpus is None else settings.num_gpus
    if settings.node_gpus and len(settings.node_gpus) != len(addresses):
        raise ValueError(f"--node-gpus lists {len(settings.node_gpus)} nodes, but there are {len(addresses)}")
    settings.patience = settings.rejoin_timeout if settings.on_node_loss == "fail" else settings.join_timeout
    return settings


def json_flag(flag: str, text: str) -> dict[str, Any]:
    """Raises ValueError where the text is not a map in JSON."""
    try:
        found = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise ValueError(f"{flag} {text!r} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{flag} {text!r} is not JSON of a map")
    return found


def who_am_i(settings: Settings, env: Mapping[str, str]) -> tuple[int, list[str], int | None]:
    """Rank of this node, addresses of all, GPUs per node where the scheduler says it."""
    if settings.rank is not None and settings.addresses:
        return settings.rank, settings.addresses, None
    if "DSTACK_NODE_RANK" in env:
        addresses = env.get("DSTACK_NODES_IPS", "").split()
        gpus = env.get("DSTACK_GPUS_PER_NODE")
        alone = addresses in ([], ["127.0.0.1"])
        return int(env["DSTACK_NODE_RANK"]), [ALONE] if alone else addresses, int(gpus) if gpus else None
    if "SLURM_JOB_NODELIST" in env:
        command = ["scontrol", "show", "hostnames", env["SLURM_JOB_NODELIST"]]
        known = env.get("FLOTILLA_NODES") or subprocess.check_output(command, text=True, timeout=SCONTROL_SECONDS)
        names = known.replace(",", " ").split()
        addresses = [ALONE] if len(names) == 1 else [resolve(name, settings.network) for name in names]
        gpus = env.get("SLURM_GPUS_ON_NODE")  # a number; SLURM_GPUS_PER_NODE may be h100:8
        if (own := env.get("SLURMD_NODENAME", "")) not in names:
            raise ValueError(f"SLURMD_NODENAME {own!r} is none of the job's nodes: {', '.join(names)}; run the agent under srun")
        return names.index(own), addresses, int(gpus) if gpus else None
    raise ValueError("which node is this? Give --rank and --addresses, or run under dstack or Slurm")


def resolve(name: str, network: ipaddress.IPv4Network | ipaddress.IPv6Network | None) -> str:
    """Address by which other nodes reach a host: the one in `network` where it has several, IPv4 before IPv6. Raises ValueError.

    A host may know itself by a loopback address, 127.0.1.1 on Debian; then its interfaces are asked.
    """
    try:
        found = [ipaddress.ip_address(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except OSError as error:
        raise ValueError(f"host {name} does not resolve to an address: {error}") from None
    known = [*found, *(map(ipaddress.ip_address, own_addresses()) if any(one.is_loopback for one in found) else ())]
    usable = [one for one in known if one in network] if network else [one for one in found if not one.is_loopback]
    if not usable:
        lacks = (
            f"no address in --network {network}" if network else "no address that other nodes reach; give --network, or correct /etc/hosts"
        )
        raise ValueError(f"host {name} has {lacks}: it resolves to {', '.join(map(str, found))}")
    return str(min(usable, key=lambda one: one.version))  # the first of the lower version


def own_addresses() -> dict[str, str]:
    """Addresses of this machine and the network interface that has each: the first IPv4 one of an interface, and all of IPv6."""
    found: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex() if sys.platform == "linux" else ():
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
                found[socket.inet_ntoa(answer[20:24])] = name
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else ():
        number, *_, name = line.split()
        found[str(ipaddress.IPv6Address(int(number, 16)))] = name
    return found


def interfaces(address: str) -> dict[str, str]:
    """What tells gloo and NCCL to talk over the interface that has this address.

    Left alone, gloo takes the address to which the host name resolves: 127.0.1.1 on Debian, where no other node finds it.
    """
    here = ipaddress.ip_address(address)
    name = own_addresses().get("127.0.0.1" if here.version == 4 and here.is_loopback else address)
    # With =, NCCL does not take eth1 for eth10 too.
    return {} if name is None else {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}


def ray_token(env: Mapping[str, str]) -> str | None:
    """The token, where Ray itself looks for it and in its order; None where authentication is off. Raises ValueError."""
    if env.get("RAY_AUTH_MODE") != "token":
        return None
    path = Path(env.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray/auth_token")
    token = env.get("RAY_AUTH_TOKEN") or (path.read_text().strip() if path.is_file() else "")
    if not token:
        raise ValueError("RAY_AUTH_MODE is token, but neither RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH nor ~/.ray/auth_token holds one")
    return token


# Quick checks; `python -m cluster_tasks.checks` is the thorough one


def quick_checks(settings: Settings, env: Mapping[str, str]) -> list[str]:
    """What is worth a word before Ray starts here. Raises ValueError for what cannot work."""
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        devices = env.get(name, "")
        if fault := device_fault(devices):
            raise ValueError(f"{name}={devices} {fault}; list each GPU of this node once, or unset it")
        if devices and settings.gpus and (shown := len(devices.split(","))) < settings.gpus:
            raise ValueError(f"{name}={devices} shows {shown} GPUs, but this node is to have {settings.gpus}")
    shared = shutil.disk_usage("/dev/shm").total / 2**30 if Path("/dev/shm").exists() else 0
    return [] if shared >= 1 else [f"/dev/shm has {shared:.2g} GB, where Ray and NCCL need gigabytes: flotilla:task.shm_size"]


def one_list_of_gpus(env: MutableMapping[str, str], kfd: Path = Path("/dev/kfd")) -> None:
    """Names the node's AMD GPUs in HIP_VISIBLE_DEVICES alone, which Ray and vLLM read; ROCm's driver is recognized by `kfd`.

    Slurm names them in ROCR_, CUDA_ and GPU_DEVICE_ORDINAL as well. The others count within what ROCR_VISIBLE_DEVICES leaves, so that
    the same numbers in both show none, or others, and Ray refuses ROCR_VISIBLE_DEVICES without HIP_VISIBLE_DEVICES.
    """
    if kfd.exists() and (devices := env.pop("ROCR_VISIBLE_DEVICES", None)) is not None:
        env["HIP_VISIBLE_DEVICES"] = devices
        for name in ("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"):
            env.pop(name, None)


def device_fault(devices: str) -> str | None:
    """What is wrong with a list of visible devices. CUDA sees those before the first that it does not know, and says nothing."""
    names = [name.strip() for name in devices.split(",")]
    if len(names) == 1:  # nothing, -1 and NoDevFiles mean no GPU
        return None
    hole = next((name for name in names if not name or name.startswith("-")), None)
    twice = next((name for name in names if names.count(name) > 1), None)
    if hole is not None:
        return "has a hole, after which no GPU is seen"
    return f"names {twice} twice" if twice else None


def claim_checkpoints(settings: Settings, env: Mapping[str, str]) -> list[str]:
    """Notes in FLOTILLA_RUNS which head it serves; says what the note of the run before means. Raises ValueError where it may not write."""
    if not (place := env.get("FLOTILLA_RUNS")):
        return []
    note = Path(place) / f".node-{env.get('DSTACK_RUN_NAME', 'ray')}.json"
    own, head = settings.addresses[settings.rank], settings.addresses[0]
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=note.parent):
            pass
        if not settings.per_host:
            return []
        before = json.loads(note.read_text())["head"] if note.exists() else None
        note.write_text(json.dumps({"head": head}))
    except OSError as error:
        who = f"{os.getuid()}:{os.getgid()}"
        mend = f"on the host `chown {who}` the folder that is mounted there, or leave flotilla:task.user out"
        raise ValueError(f"user {who} cannot write checkpoints to {place}: {error.strerror}; {mend}") from None
    return where_checkpoints_are(own, head, before)


def where_checkpoints_are(own: str, head: str, before: str | None) -> list[str]:
    """For folders of each host, where jobs write on the head: whether a new run finds what the run before left with its head."""
    shared = "with flotilla:checkpoints.kind shared, network or bucket any host finds them"
    if before is None and own == head:
        return [f"checkpoints stay on this host, {own}; a run whose head is another host does not find them; {shared}"]
    if before in (None, head) or own not in (before, head):
        return []
    return [f"the checkpoints of the run before are on {before}, but now the head is {head}, which does not find them; {shared}"]


# Ray on this node


def ray_command(settings: Settings) -> list[str]:
    """`ray start` for this node. Ports that only this node's own processes use are left to the kernel: nodes may share a machine."""
    head, own = settings.addresses[0], settings.addresses[settings.rank]
    flags: dict[str, Any] = {"--node-ip-address": own, "--num-cpus": settings.num_cpus, "--dashboard-agent-listen-port": 0}
    if settings.rank == 0:
        flags |= {"--port": settings.port, "--dashboard-host": "127.0.0.1", "--dashboard-port": settings.dashboard_port}
        # Ray always starts its client server, which nothing here uses: any free port instead of 10001, which another Ray may have.
        flags |= {"--include-dashboard": "true", "--ray-client-server-port": free_port()}
    else:
        flags |= {"--address": f"[{head}]:{settings.port}" if ":" in head else f"{head}:{settings.port}"}
    flags |= PINNED_PORTS if settings.pin_ports else {}
    flags |= {"--num-gpus": 0 if settings.gpus == 0 else settings.num_gpus, "--resources": settings.resources or None}
    flags |= {"--object-store-memory": settings.object_store_mb and settings.object_store_mb * 2**20, "--temp-dir": settings.temp_dir}
    given = [f"{name}={value}" for name, value in flags.items() if value is not None]
    return ["ray", "start", "--block", "--log-color=false", *(["--head"] if settings.rank == 0 else []), *given]


@dataclass(frozen=True)
class Ray:
    """`ray start --block` on this node, and what it prints."""

    process: subprocess.Popen[bytes]
    output: IO[bytes]

    def ended(self) -> str | None:
        """None while it runs; else its exit code and last words."""
        if self.process.poll() is None:
            return None
        self.output.seek(0)
        text = self.output.read().decode(errors="replace")
        died = dict(RAY_PART.findall(text))
        who = ": " + ", ".join(f"{part} {code}" for part, code in died.items()) if died else f" with code {self.process.returncode}:"
        lines = [line for line in text.splitlines() if not RAY_NOISE.search(line)][-12:]
        return "\n".join([f"Ray ended on this node{who}", *lines])


@contextlib.contextmanager
def ray_node(settings: Settings) -> Iterator[Ray]:
    """Runs Ray on this node inside the `with`. Ends it and nothing else on the way out."""
    stop_wait = {"RAY_JOB_STOP_WAIT_TIME_S": str(settings.stop_timeout)}
    env = RAY_DEFAULTS | stop_wait | interfaces(settings.addresses[settings.rank]) | os.environ
    with tempfile.TemporaryFile() as output:
        process = spawn(ray_command(settings), env, output)
        try:
            yield Ray(process, output)
        finally:
            if port_answers(
                settings.addresses[0], settings.port
            ):  # else there is nobody whom Ray could say goodbye to, and it would only hang
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(RAY_STOP_SECONDS)
            with contextlib.suppress(ProcessLookupError):  # nothing is left of the group, which is how it should be
                os.killpg(process.pid, signal.SIGKILL)
            try:
                process.wait(RAY_STOP_SECONDS)
            except subprocess.TimeoutExpired:  # the kernel holds it, as on a file system that hangs
                log.error("Ray, pid %d, was killed but has not ended within %d s", process.pid, RAY_STOP_SECONDS)


def spawn(command: list[str], env: dict[str, str], output: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
    """Starts a process that ends with the agent, however that ends; Ray does the same to its own children.

    With `output` they get neither our terminal nor any other open file: dstack waits for whoever holds those. They ignore SIGUSR1,
    which Slurm may send to all processes of a node; it means the agent, and jobs that handle it.
    """

    def die_with_parent() -> None:  # between fork and exec
        if LIBC is not None:
            LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    return subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        preexec_fn=die_with_parent,  # noqa: PLW1509 - the agent has no threads
    )


# The dashboard


@dataclass(frozen=True)
class Dashboard:
    """What the head's dashboard, which is also the job API, tells to who shows the token. It is never asked through a proxy."""

    url: str
    token: str | None

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """JSON; POST where there is a body. Raises OSError where nothing answers, or not with JSON."""
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.token}"} if self.token else {})
        request = urllib.request.Request(f"{self.url}{path}", None if body is None else json.dumps(body).encode(), headers)
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10) as answer:
                return json.load(answer)
        except (http.client.HTTPException, ValueError) as error:  # cut off, or another service
            raise OSError(f"{path}: {error}") from error

    def alive_nodes(self) -> dict[str, dict[str, float]] | None:
        """Resources of the nodes that are ALIVE, by address; None where it does not answer (yet)."""
        try:
            nodes = self.ask("/api/v0/nodes?limit=10000")["data"]["result"]["result"]
        except (OSError, KeyError, TypeError):  # while it starts it answers with errors
            return None
        return {node["node_ip"]: node["resources_total"] for node in nodes if node["state"] == "ALIVE"}

    def started(self) -> dict[str, float]:
        """When each ALIVE node started, by its own clock, in seconds since the epoch. Raises OSError."""
        nodes = self.ask("/api/v0/nodes?limit=10000&detail=1")["data"]["result"]["result"]
        return {node["node_ip"]: node["start_time_ms"] / 1000 for node in nodes if node["state"] == "ALIVE" and node.get("start_time_ms")}

    def exit_code(self, job: str) -> int | None:
        """Of a job that has ended, 128 + N where signal N ended it; None while it runs. Raises OSError."""
        info = self.ask(f"/api/jobs/{job}")
        if info["status"] not in ("SUCCEEDED", "FAILED", "STOPPED"):
            return None
        code = info.get("driver_exit_code")
        if code is None:
            return 0 if info["status"] == "SUCCEEDED" else 1
        return code if code >= 0 else 128 - code

    def stop(self, job: str) -> None:
        """Sends SIGTERM to a job. Raises OSError."""
        self.ask(f"/api/jobs/{job}/stop", {})


def missing(addresses: list[str], gpus: int | list[int] | None, alive: Mapping[str, Mapping[str, float]]) -> list[str]:
    """What the cluster still lacks, in words; empty when it is whole. `gpus` of every node, or of each in order."""
    if gone := [address for address in addresses if address not in alive]:
        return gone
    wanted = gpus if isinstance(gpus, list) else [gpus or 0] * len(addresses)
    have = [alive[address].get("GPU", 0) for address in addresses]
    return [f"{a} with {h:.0f} of {w} GPUs" for a, h, w in zip(addresses, have, wanted, strict=True) if h < w]


# The head


def run_head(settings: Settings) -> int:
    for port, flag in ((settings.port, "--port"), (settings.dashboard_port, "--dashboard-port")):
        if not port_is_free(port):
            raise Failure(2, f"port {port} is in use on this node; choose another with {flag}")
    with ray_node(settings) as ray:
        code = lead(settings, ray)
    if code == 0:
        say_farewell(settings)
    return code


def lead(settings: Settings, ray: Ray) -> int:
    """Until the job has ended; returns its code. Raises Failure."""
    wait_until_whole(settings, ray)
    if settings.when_ready:
        print(settings.when_ready, flush=True)
    seconds = settings.stop_timeout
    try:
        Notices.of(settings).clear()
        job = Job.submit(settings) if settings.job else None
        return watch_cluster(settings, ray, job)
    except Reclaimed:
        raise
    except Failure:
        seconds = LOST_SAVE_SECONDS
        raise
    finally:
        stop_jobs(settings, seconds)


def say_farewell(settings: Settings) -> None:
    """dstack submits a run again when a worker ends with an error, even where the head's job is done."""
    head, family = settings.addresses[0], socket.AF_INET6 if ":" in settings.addresses[0] else socket.AF_INET
    waiting, deadline = set(settings.addresses[1:]), time.monotonic() + FAREWELL_SECONDS
    with contextlib.suppress(TimeoutError), socket.create_server((head, settings.port), family=family) as server:
        while waiting and (left := deadline - time.monotonic()) > 0:
            server.settimeout(left)
            connection, (address, *_) = server.accept()
            with connection, contextlib.suppress(OSError):  # it went at once
                connection.sendall(FAREWELL)
            waiting.discard(address)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was closed a moment ago is free
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def wait_until_whole(settings: Settings, ray: Ray) -> None:
    """Returns when every node and every GPU is there."""
    size, start, alive = len(settings.addresses), time.monotonic(), {}
    seen: dict[str, float] = {}  # address: when it was first ALIVE, by our clock

    def lacking() -> str | None:
        nonlocal alive
        if end := ray.ended():
            raise Failure(RAY_FAILED, end)
        found = settings.dashboard.alive_nodes()
        alive = found or {}
        seen.update({address: time.time() for address in alive if address not in seen})
        wanted = ["the head's dashboard"] if found is None else missing(settings.addresses, settings.node_gpus or settings.gpus, found)
        return f"{len(alive)} of {size} nodes, waiting for {', '.join(wanted)}" if wanted else None

    wait(lacking, settings, time.monotonic() + settings.join_timeout)
    with contextlib.suppress(OSError):  # it answered a moment ago
        for line in clock_faults(seen, settings.dashboard.started()):
            log.warning("%s", line)
    cpus, gpus = (sum(node.get(name, 0) for node in alive.values()) for name in ("CPU", "GPU"))
    log.info("ready: %d of %d nodes, %g CPUs, %g GPUs after %.1f s", size, size, cpus, gpus, time.monotonic() - start)


def clock_faults(seen: Mapping[str, float], started: Mapping[str, float]) -> list[str]:
    """Nodes whose clocks are far from ours: `seen` is our time of a start, `started` the node's own."""
    apart = {address: started[address] - seen[address] for address in seen if address in started}
    text = "the clock of {} is about {:.0f} s {} the head's; files and logs will be dated wrongly: mend its time service (NTP)"
    far = {address: by for address, by in apart.items() if abs(by) > CLOCK_SECONDS}
    return [text.format(address, abs(by), "ahead of" if by > 0 else "behind") for address, by in far.items()]


def watch_cluster(settings: Settings, ray: Ray, job: Job | None) -> int:
    """Until the job ends (returns its code), or a node is lost for too long or Ray ends (raises Failure)."""
    presence, vitals, notices = Presence.of(settings), Vitals.of(settings), Notices.of(settings)
    code, ended, answered = None, 0.0, time.monotonic()
    while True:
        pause(1)
        vitals.tell()
        now = time.monotonic()
        if end := ray.ended():
            raise Failure(RAY_FAILED, end)
        if job and code is None and (code := job.exit_code(settings.dashboard)) is not None:
            ended = now
        # A job may fail before it is known that it lost a node.
        if code is not None and (code == 0 or len(settings.addresses) == 1 or now - ended > BLAME_SECONDS):
            return code
        if address := notices.look():
            raise Reclaimed(NODE_LOST, f"the cloud takes the machine of {address} back; jobs were asked to save")
        alive = settings.dashboard.alive_nodes()
        if alive is not None:
            answered = now
            presence.look(alive)
        elif now - answered > settings.join_timeout:
            raise Failure(RAY_FAILED, f"the dashboard has not answered for {settings.join_timeout} s")
        if code is not None and presence.lost:
            raise Failure(NODE_LOST, f"the job failed with {code} when {' and '.join(presence.lost)} was lost")


@dataclass
class Presence:
    """Which nodes are there: those that Ray calls ALIVE and whose hosts answer. Ray alone takes 50 s to miss a host that is cut off."""

    settings: Settings
    probed: set[str]  # of the hosts; what drops packets to this port from the start is left to Ray
    lost: dict[str, float] = field(default_factory=dict)  # address: since when

    @classmethod
    def of(cls, settings: Settings) -> Presence:
        others = settings.addresses[1:]
        return cls(settings, set(others) - silent(others, settings.port))

    def look(self, alive: Mapping[str, Mapping[str, float]]) -> None:
        """Says who is gone and who is back. Raises Failure when one is gone for too long."""
        policy, limit = f"--on-node-loss {self.settings.on_node_loss}", self.settings.patience
        here, now = alive.keys() - silent(self.probed, self.settings.port), time.monotonic()
        for rank, address in enumerate(self.settings.addresses):
            node = f"node {rank} ({address})"
            if address not in here and address not in self.lost:
                self.lost[address] = now
                how = "its host does not answer" if address in alive else "Ray has ended there"
                log.error("lost %s, %s; it has %d s to return (%s)", node, how, limit, policy)
            elif address in here and address in self.lost:
                log.info("%s is back after %.0f s", node, now - self.lost.pop(address))
            elif address in self.lost and now - self.lost[address] > limit:
                raise Failure(NODE_LOST, f"{node} is lost: not back within {limit} s ({policy})")


# Jobs


@dataclass(frozen=True)
class Job:
    """The job of --job, and `ray job submit`, which uploads it and then prints its output."""

    name: str
    client: subprocess.Popen[bytes]
    deadline: float  # to be accepted

    @classmethod
    def submit(cls, settings: Settings) -> Job:
        """Under Slurm the name tells requeued attempts apart."""
        attempt = [os.environ.get("SLURM_JOB_ID") or str(int(time.time())), os.environ.get("SLURM_RESTART_COUNT")]
        name = "-".join(["job", *filter(None, attempt)])
        command = ["ray", "job", "submit", "--address", settings.dashboard.url, "--submission-id", name]
        command += ["--working-dir", settings.working_dir] if settings.working_dir else []
        command += ["--runtime-env", settings.runtime_env] if settings.runtime_env else []
        command += ["--", *shlex.split(settings.job or "")]
        log.info("submitting %s: %s", name, settings.job)
        return cls(name, spawn(command, RAY_DEFAULTS | os.environ), time.monotonic() + SUBMIT_SECONDS)

    def exit_code(self, dashboard: Dashboard) -> int | None:
        """None while it runs; its output is printed to the end before this returns a code. Raises Failure where Ray does not take it."""
        client_ended = self.client.poll() is not None  # looked at first: when it has ended, Ray knows the job
        try:
            code = dashboard.exit_code(self.name)
        except urllib.error.HTTPError as error:
            if error.code == 404 and client_ended:
                raise Failure(2, "the job was not accepted; the lines above say why") from None
            if error.code == 404 and time.monotonic() > self.deadline:
                raise Failure(NOT_READY, f"the job was not accepted within {SUBMIT_SECONDS} s") from None
            return None
        except OSError:
            return None  # watch_cluster counts how long the dashboard is silent
        if code is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.client.wait(10)
            log.info("%s has ended with exit code %d", self.name, code)
        return code


def silent(addresses: Iterable[str], port: int) -> set[str]:
    """Hosts that do not answer; all are asked at once. A port that refuses is an answer: the host is there."""
    with contextlib.ExitStack() as stack:
        waiting: dict[socket.socket, str] = {}
        for address in addresses:
            probe = stack.enter_context(socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET))
            probe.setblocking(False)
            probe.connect_ex((address, port))
            waiting[probe] = address
        found, deadline = set(), time.monotonic() + PROBE_SECONDS
        while waiting and (left := deadline - time.monotonic()) > 0:
            for probe in select.select([], list(waiting), [], left)[1]:
                address = waiting.pop(probe)
                if probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) not in (0, errno.ECONNREFUSED):
                    found.add(address)
        return found | set(waiting.values())


@dataclass
class Vitals:
    """What ends training without a word of its own: full disks, and the kernel's killing where memory is short."""

    folders: list[str]
    killed: int  # processes, so far
    full: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, settings: Settings) -> Vitals:
        folders = (settings.temp_dir or tempfile.gettempdir(), os.environ.get("FLOTILLA_RUNS"))
        return cls([folder for folder in folders if folder and Path(folder).is_dir()], oom_kills())

    def tell(self) -> None:
        """Logs what is new."""
        for folder in self.folders:
            disk = shutil.disk_usage(folder)
            if disk.free >= disk.total * FULL:
                self.full.discard(folder)
            elif folder not in self.full:
                self.full.add(folder)
                log.error("disk full: %s has %d of %d MB left", folder, disk.free >> 20, disk.total >> 20)
        if (killed := oom_kills()) > self.killed:
            log.error("out of memory: the kernel killed %d processes on this node; see flotilla:fleets[].memory", killed - self.killed)
            self.killed = killed


@dataclass
class Notices:
    """A cloud's word that it takes a spot machine back. A worker tells the head by a file among the checkpoints, which both see."""

    cloud: str | None
    file: Path
    own: str
    asked: float = 0

    @classmethod
    def of(cls, settings: Settings) -> Notices:
        place, run = os.environ.get("FLOTILLA_RUNS"), os.environ.get("DSTACK_RUN_NAME", "ray")
        return cls(settings.spot if place else None, Path(place or "/") / f".leaving-{run}", settings.addresses[settings.rank])

    def clear(self) -> None:
        """Forgets those of an earlier attempt."""
        if self.cloud:
            self.file.unlink(missing_ok=True)

    def look(self) -> str | None:
        """Address of the node that is taken back."""
        if self.cloud is None:
            return None
        if self.file.exists():
            return self.file.read_text()
        if time.monotonic() - self.asked > NOTICE_SECONDS:
            self.asked = time.monotonic()
            if reclaimed(self.cloud):
                log.warning("the cloud takes this machine back: jobs are to save")
                self.file.write_text(self.own)
        return None


def reclaimed(cloud: str) -> bool:
    """https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html and
    https://cloud.google.com/compute/docs/instances/create-use-spot#detect-preemption"""
    if cloud == "gcp":
        return metadata("GET", "/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"}) == "TRUE"
    token = metadata("PUT", "/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"})
    return bool(token and metadata("GET", "/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token}))


def metadata(method: str, path: str, headers: dict[str, str]) -> str | None:
    """What the machine's metadata service answers, at the same address on both clouds; None where it has nothing to say."""
    request = urllib.request.Request(f"http://169.254.169.254{path}", headers=headers, method=method)
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=2) as answer:
            return answer.read().decode().strip()
    except (OSError, http.client.HTTPException):
        return None


def oom_kills() -> int:
    """Processes of this container that the kernel has killed for want of memory, by cgroup v2 or v1; 0 where neither tells."""
    for file in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        with contextlib.suppress(OSError):
            counts = dict(line.split() for line in Path(file).read_text().splitlines())
            return int(counts.get("oom_kill", 0))
    return 0


def stop_jobs(settings: Settings, seconds: int) -> None:
    """Sends SIGTERM to all jobs that run and waits until they have saved their checkpoints and ended."""
    deadline = time.monotonic() + seconds + min(seconds, 10)
    asked: set[str] = set()
    while time.monotonic() < deadline:
        try:
            listed = settings.dashboard.ask("/api/jobs/")
            jobs = [j["submission_id"] for j in listed if j["status"] in ("PENDING", "RUNNING") and j["submission_id"]]
            for job in set(jobs) - asked:
                log.info("asking %s to save and stop, at most %d s", job, seconds)
                settings.dashboard.stop(job)
                asked.add(job)
        except OSError as error:
            return log.warning("jobs cannot be asked to stop, the dashboard does not answer: %s", error)
        if not jobs:
            return None
        time.sleep(0.5)
    return log.error("jobs did not stop within %d s: %s", seconds, ", ".join(sorted(asked)))


# Workers


def run_worker(settings: Settings) -> int:
    """Joins, and joins again when Ray ends here. Raises Failure when the head is gone, or does not come in time."""
    deadline, joined = time.monotonic() + settings.join_timeout, False
    while True:
        wait_for_head(settings, deadline, joined)
        log.info("joining the cluster of %s", settings.addresses[0])
        start = heard = time.monotonic()
        vitals, notices = Vitals.of(settings), Notices.of(settings)
        with ray_node(settings) as ray, outlasting_jobs(settings):
            while not (end := ray.ended()):
                pause(1)
                vitals.tell()
                notices.look()
                answers, silence = head_answers(settings), time.monotonic() - heard
                if answers:
                    heard = time.monotonic()
                elif answers is False and silence > HEAD_GONE_SECONDS:
                    raise head_is_gone(settings)
                elif silence > settings.patience:
                    raise Failure(NODE_LOST, f"nothing was heard from the head for {silence:.0f} s: this node is cut off")
        say(end)
        now = time.monotonic()
        if now > deadline:
            raise Failure(RAY_FAILED, f"Ray could not join within {settings.join_timeout} s (--join-timeout)")
        if now - start > STEADY_SECONDS:  # it had joined: a new incident, with a deadline of its own
            joined, deadline = True, now + settings.join_timeout
        pause(1)


def wait_for_head(settings: Settings, deadline: float, joined: bool) -> None:
    start = time.monotonic()

    def lacking() -> str | None:
        answers = head_answers(settings)
        if joined and answers is False and time.monotonic() - start > HEAD_GONE_SECONDS:
            raise head_is_gone(settings)
        return None if answers else f"waiting for the head at {settings.addresses[0]}:{settings.port}"

    wait(lacking, settings, deadline)


def head_is_gone(settings: Settings) -> Failure:
    """Under Slurm the job ends with the head's code, and srun would report a worker's own as an error."""
    return Failure(0 if under_slurm() else NODE_LOST, f"the head at {settings.addresses[0]}:{settings.port} is gone")


@contextlib.contextmanager
def outlasting_jobs(settings: Settings) -> Iterator[None]:
    """Schedulers ask all nodes to stop at once; this one stays while jobs save, which is until the head is gone."""
    try:
        yield
    except Stopped:
        deadline = time.monotonic() + settings.stop_timeout + RAY_STOP_SECONDS
        while (under_slurm() or under_dstack()) and head_answers(settings) and time.monotonic() < deadline:
            time.sleep(0.5)
        raise


def under_slurm() -> bool:
    return "SLURM_JOB_ID" in os.environ


def under_dstack() -> bool:
    return "DSTACK_NODE_RANK" in os.environ


def head_answers(settings: Settings) -> bool | None:
    """As `port_answers`. Raises HeadEnded when it has said farewell; Ray speaks first too, so this does not wait."""
    return port_answers(settings.addresses[0], settings.port, listen=True)


def port_answers(address: str, port: int, listen: bool = False) -> bool | None:
    """True: it is open. False: it refuses, nothing listens. None: no answer, which may be the network."""
    try:
        with socket.create_connection((address, port), timeout=3) as probe:
            probe.settimeout(1)
            with contextlib.suppress(TimeoutError):
                if listen and probe.recv(len(FAREWELL)) == FAREWELL:
                    raise HeadEnded
    except ConnectionRefusedError:
        return False
    except OSError:
        return None
    return True


# torchrun


def run_torchrun(settings: Settings) -> NoReturn:
    """Becomes torchrun. A SIGUSR1 reaches its ranks, which have --stop-timeout seconds to save."""
    stop = {"TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGUSR1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(settings.stop_timeout)}
    head, size = settings.addresses[0], len(settings.addresses)
    flags = {"--nnodes": size, "--node-rank": settings.rank, "--nproc-per-node": settings.gpus or 1}
    flags |= {"--master-addr": head, "--master-port": settings.port}
    command = ["torchrun", *(f"{name}={value}" for name, value in flags.items()), *shlex.split(settings.torchrun)]
    log.info("%s", shlex.join(command))
    os.execvpe(command[0], command, stop | interfaces(settings.addresses[settings.rank]) | os.environ)


# The agent


def wait(lacking: Callable[[], str | None], settings: Settings, deadline: float) -> None:
    """Until nothing is lacking; says what is, whenever that changes and every 10 s. Raises Failure at the deadline."""
    said, again = None, 0.0
    while line := lacking():
        now = time.monotonic()
        if now > deadline:
            raise Failure(NOT_READY, f"{line}: not within {settings.join_timeout} s (--join-timeout)")
        if line != said or now > again:
            said, again = line, now + 10
            log.info("%s, %.0f s left", line, deadline - now)
        pause(0.2)


def pause(seconds: float) -> None:
    """Sleeps between two looks; raises Stopped as soon as a signal has come."""
    deadline = time.monotonic() + seconds
    while not signals and (left := deadline - time.monotonic()) > 0:
        time.sleep(min(left, 0.2))
    if signals:
        raise Stopped


def say(text: str) -> None:
    """An error of one or more lines. Each gets rank and time: schedulers mix the output of all nodes."""
    for line in text.splitlines():
        log.error("%s", line)


def main(argv: list[str] | None = None) -> int:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda number, _: signals.append(number))
    if not os.access(os.environ.get("HOME") or "/", os.W_OK):  # as / is, the home of a user whom the image does not know
        os.environ["HOME"] = tempfile.gettempdir()
    try:
        one_list_of_gpus(os.environ)
        settings = read_settings(sys.argv[1:] if argv is None else argv, os.environ)
        if settings.torchrun and shutil.which("torchrun") is None:
            raise ValueError("`torchrun` is not on PATH; the image must contain PyTorch")
        if not settings.torchrun and shutil.which("ray") is None:
            raise ValueError("`ray` is not on PATH; the image must contain Ray")
        warnings = quick_checks(settings, os.environ) + claim_checkpoints(settings, os.environ)
    except (ValueError, OSError, subprocess.SubprocessError) as error:
        print(f"node.py: {error}", file=sys.stderr, flush=True)
        return 2
    prefix = f"[node {settings.rank} %(asctime)s]"
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format=f"{prefix} %(message)s", datefmt="%H:%M:%S")
    for line in warnings:
        log.warning("%s", line)
    try:
        if settings.torchrun:
            run_torchrun(settings)
        return run_head(settings) if settings.rank == 0 else run_worker(settings)
    except Failure as failure:
        say(str(failure))
        return failure.code
    except HeadEnded:
        log.info("the head has ended: the job is done")
        return 0
    except Stopped:
        log.info("%s: stopped", signal.Signals(signals[0]).name)
        return 128 + signals[0] if settings.job else 0


if __name__ == "__main__":
    sys.exit(main())
