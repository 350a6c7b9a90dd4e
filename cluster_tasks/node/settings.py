"""Which node this is and how it shall run: from flags, dstack, or Slurm."""

from __future__ import annotations

import argparse
import ipaddress
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import sandbox_pool
from .dashboard import Dashboard, ray_token
from .errors import NOT_READY, Failure
from .lifeline import FLAG
from .monitoring_settings import Monitoring
from .network import ALONE, NoAnswer, resolve
from .ports import free_port
from .service import Service, parse
from .waiting import pause

DASHBOARD_PORT = 8265  # on the node; flotilla:task.dashboard_port is where a person finds it
STOP_SECONDS = 120  # a stopped job may take this long to save a checkpoint
DRAIN_SECONDS = 15  # with Ray's own end within 30, which is what Google's notice and Slurm's KillWait are
ASK_AGAIN_SECONDS = 1.0  # for a host's address
SCONTROL_SECONDS = 30  # slurmctld may be busy


class Settings(argparse.Namespace):
    """The flags of `read_settings`, and what was found out about this node."""

    rank: int
    addresses: list[str]  # of all nodes, in order of rank
    gpus: int | None  # expected on each node; None: as many as there are
    node_gpus: list[int] | None  # expected on each node where they are not alike, in order of rank
    join_timeout: int = 600  # seconds that nodes wait for one another
    patience: int  # seconds that a lost node has to return
    services: tuple[Service, ...]  # of all nodes
    monitoring: Monitoring | None  # the head's
    join: str = ""  # run whose cluster this node joins, as one of an elastic fleet
    alerts_port: int | None = None  # on the head, where alerts are posted from
    alerts_secret: Path | None = None  # file of what has to be shown there
    queue: str  # JSON of its rules, or nothing
    sandboxes: str  # JSON of fleets, or nothing
    sandbox_port: int
    dashboard: Dashboard  # the head's, as the head itself reaches it
    place: Path  # of what services write; services.py makes it afresh
    spill: str | None = None  # folder for objects that do not fit in memory, where it is not below Ray's
    ray_dashboard_port: int  # on which Ray's own dashboard listens, behind identity.py

    @property
    def ray_logs(self) -> str:
        """Where Ray on this node writes, for an error."""
        return f"Ray's logs on {self.addresses[self.rank]}: {self.temp_dir or '/tmp/ray'}/session_latest/logs"

    @property
    def gate(self) -> Path:
        """Is there on the head while services are not ready, and says which; no job is let in."""
        return self.place / "gate"

    @property
    def leaving(self) -> Path:
        """Is there once the head has asked all jobs to save and stop: the queue starts none then."""
        return self.place / "leaving"

    @property
    def routes(self) -> Path:
        """Of what answers on the dashboard's port beside Ray, a file for each (identity.py). Jobs may write there too."""
        return self.place / "routes"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="node", description="Starts this node of a Ray cluster.")
    add = parser.add_argument
    add("--stack", default="", help="name of the stack whose cluster this is; told to who asks, see identity.py")
    add("--rank", type=int, help="0 is the head")
    add("--addresses", type=lambda text: text.split(","), help="addresses of all nodes in order of rank, with commas")
    add("--network", type=ipaddress.ip_network, help="CIDR; nodes talk to one another on their address in it")
    add("--num-cpus", type=int, help="CPUs that Ray offers; default: all")
    add("--node-gpus", type=counts, help="GPUs of each node in order of rank, with commas")
    add("--num-gpus", type=int, help="GPUs that Ray offers; default: all")
    add("--resources", default="", help='custom Ray resources of this node, such as {"v100": 8}')
    add("--host-resources", default="", help='the same of single nodes, by address, such as {"10.0.0.5": {"v100": 8}}')
    add("--object-store-mb", type=int, help="size of the object store; default: 30 %% of memory")
    add("--port", type=int, default=6379, help="of the head, for the other nodes")
    add("--dashboard-port", type=int, default=DASHBOARD_PORT)
    add("--pin-ports", action="store_true", help="give Ray's other ports fixed numbers too, for firewalls; needs a node of its own")
    add("--temp-dir", help="Ray's folder for sockets and logs, short and closed to others; default: a fresh one, removed at the end")
    add("--join-timeout", type=int, default=Settings.join_timeout, help="seconds that nodes wait for one another")
    add("--burn-in", type=int, default=0, help="seconds of load on the GPUs before this node joins; one that fails does not")
    add("--rejoin-timeout", type=int, default=20, help="seconds within which a lost node must be back, with --on-node-loss fail")
    add("--on-node-loss", choices=["fail", "wait"], default="fail", help="wait: give a lost node as long as --join-timeout")
    add("--stop-timeout", type=int, default=STOP_SECONDS, help="seconds that a stopped job has to save a checkpoint")
    add("--per-host", action="store_true", help="checkpoints are in a folder of each host: say where those of the run before are")
    add("--spot", choices=["imdsv2", "compute-metadata"], help="metadata service that says when a spot machine is taken back")
    add("--user", help="user or user:group to become, by names or numbers; for an agent that starts as root")
    add("--services", default="", help='what runs beside Ray, by name, such as {"search": {"command": "...", "port": 8000}}')
    add("--monitoring", default="", help="what Prometheus and Grafana run with beside Ray on the head; JSON of monitoring.py")
    add("--sandboxes", default="", help='pools of sandboxes, such as [{"ranks": [0, 1], "number": 32, "warm": 4, "memory_mb": 0}]')
    add("--sandbox-port", type=int, default=sandbox_pool.PORT, help="of the pools, on each node that has one")
    add("--job", help="command of a Ray job")
    add("--working-dir", help="of the job; uploaded to all nodes")
    add("--runtime-env", help="file with the Ray runtime environment of the job")
    add("--torchrun", help="arguments of torchrun, which then runs in place of Ray; --port is where its ranks meet")
    add(FLAG, action="store_true", help="in a container: end all of it when standard input ends, as it does with the client")
    add("--fleet", help="of an elastic node: the name of its fleet, a label of its Ray node; it joins the cluster of --join")
    add("--join", help="the run whose head this node joins and leaves; its head leaves a note of where it is in FLOTILLA_RUNS")
    add("--address", help="own address of a node with --join; default: the one from which it reaches the head")
    add(
        "--drain-seconds", type=int, default=DRAIN_SECONDS, help="that a node with --join has to give work back before its machine is taken"
    )
    add("--queue", default="", help='how jobs share the cluster, such as {"min_run": 600, "owners": {"ann": {"weight": 2, "quota": 8}}}')
    add("--when-ready", help="text to print when the cluster is ready, such as how to reach its dashboard")
    return parser


def read_settings(argv: list[str], env: Mapping[str, str]) -> Settings:
    """Raises ValueError where it does not know which node this is, or a setting is wrong."""
    settings = _parser().parse_args(shlex.split(env.get("FLOTILLA_NODE_ARGS", "")) + argv, namespace=Settings())
    resources, of_hosts = json_flag("--resources", settings.resources), json_flag("--host-resources", settings.host_resources)
    settings.services = parse(settings.services)  # type: ignore[arg-type]  # the flag's text until here
    settings.monitoring = Monitoring.of(settings.monitoring)  # type: ignore[arg-type]  # the same
    if settings.join and (settings.torchrun or settings.job or not settings.fleet):
        raise ValueError("--join is for a node of an elastic fleet: it needs --fleet, and takes neither --job nor --torchrun")
    if settings.join and not env.get("FLOTILLA_RUNS"):
        raise ValueError("--join needs FLOTILLA_RUNS, the folder that all nodes see, in which the head leaves its note")
    if (settings.services or settings.sandboxes) and settings.torchrun:
        raise ValueError("--services and --sandboxes need Ray; torchrun takes the agent's place, and nobody would look after them")
    settings.dashboard = Dashboard(f"http://127.0.0.1:{settings.dashboard_port}", ray_token(env, settings.stack))
    settings.ray_dashboard_port = free_port()
    rank, addresses, gpus = who_am_i(settings, env)
    if not 0 <= rank < len(addresses):
        raise ValueError(f"rank {rank} is out of range for {len(addresses)} addresses: {', '.join(addresses)}")
    if settings.network and ipaddress.ip_address(addresses[rank]) not in settings.network:
        raise ValueError(f"address {addresses[rank]} of rank {rank} is not in --network {settings.network}")
    settings.rank, settings.addresses = rank, addresses
    settings.services += sandbox_pool.services(settings.sandboxes, rank, settings.sandbox_port, settings.dashboard.token)
    if addresses[rank] in of_hosts:
        settings.resources = json.dumps(resources | of_hosts[addresses[rank]])
    settings.gpus = gpus if settings.num_gpus is None else settings.num_gpus
    if settings.node_gpus and len(settings.node_gpus) != len(addresses):
        raise ValueError(f"--node-gpus lists {len(settings.node_gpus)} nodes, but there are {len(addresses)}")
    settings.place = Path(settings.temp_dir or tempfile.gettempdir()) / f"services-{settings.port}-{rank}"
    settings.patience = settings.rejoin_timeout if settings.on_node_loss == "fail" else settings.join_timeout
    return settings


def counts(text: str) -> list[int]:
    """A flag's numbers, with commas. Raises ArgumentTypeError, whose text argparse shows."""
    if not all(number.isdecimal() for number in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is no number, or several with commas, such as 0,8,8")
    return [int(number) for number in text.split(",")]


def json_flag(flag: str, text: str) -> dict[str, Any]:
    """Raises ValueError where the text is not a map in JSON."""
    try:
        found = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise ValueError(f"{flag} {text!r} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{flag} {text!r} is not JSON of a map")
    return found


def hostnames(nodes: str) -> str:
    """The names that a node list of Slurm stands for. Raises ValueError where scontrol does not say them."""
    command = ["scontrol", "show", "hostnames", nodes]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=SCONTROL_SECONDS, check=True).stdout
    except FileNotFoundError:
        why = "is not on PATH"
    except subprocess.TimeoutExpired:
        why = f"did not answer within {SCONTROL_SECONDS} s"
    except subprocess.CalledProcessError as error:
        why = (error.stderr.strip().splitlines() or [f"exit code {error.returncode}"])[0]
    raise ValueError(f"the job's nodes {nodes} are not known: {' '.join(command[:3])}: {why}")


def who_am_i(settings: Settings, env: Mapping[str, str]) -> tuple[int, list[str], int | None]:
    """Rank of this node, addresses of all, GPUs per node where the scheduler says it."""
    if settings.join:  # alone until it has found the head: elastic.py
        gpus = env.get("DSTACK_GPUS_PER_NODE") or env.get("SLURM_GPUS_ON_NODE")
        return 0, [settings.address or ALONE], int(gpus) if gpus else None
    if settings.rank is not None and settings.addresses:
        return settings.rank, settings.addresses, None
    if "DSTACK_NODE_RANK" in env:
        addresses = env.get("DSTACK_NODES_IPS", "").split()
        gpus = env.get("DSTACK_GPUS_PER_NODE")
        alone = addresses in ([], ["127.0.0.1"])
        return int(env["DSTACK_NODE_RANK"]), [ALONE] if alone else addresses, int(gpus) if gpus else None
    if "SLURM_JOB_NODELIST" in env:
        known = env.get("FLOTILLA_NODES") or hostnames(env["SLURM_JOB_NODELIST"])
        names = known.replace(",", " ").split()
        addresses = [ALONE] if len(names) == 1 else [_resolved(name, settings) for name in names]
        gpus = env.get("SLURM_GPUS_ON_NODE")  # a number; SLURM_GPUS_PER_NODE may be h100:8
        if (own := env.get("SLURMD_NODENAME", "")) not in names:
            raise ValueError(f"SLURMD_NODENAME {own!r} is none of the job's nodes: {', '.join(names)}; run the agent under srun")
        return names.index(own), addresses, int(gpus) if gpus else None
    raise ValueError("which node is this? Give --rank and --addresses, or run under dstack or Slurm")


def _resolved(name: str, settings: Settings) -> str:
    """As `resolve`, which is asked again while the name service does not answer. Raises Failure after --join-timeout, Stopped."""
    deadline, said = time.monotonic() + settings.join_timeout, False
    while True:
        try:
            return resolve(name, settings.network)
        except NoAnswer as error:
            if time.monotonic() > deadline:
                raise Failure(NOT_READY, f"{error}: not within {settings.join_timeout} s (--join-timeout)") from None
            if not said:
                print(f"node: {error}; trying again for {settings.join_timeout} s", file=sys.stderr, flush=True)
            said = True
            pause(ASK_AGAIN_SECONDS)
