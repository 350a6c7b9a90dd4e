"""From `dstack apply` to a whole Ray cluster on two hosts, against a task that only sleeps, on the hosts of `lab/dstack`.

Then the node agent's own time, without dstack, for 2, 8 and 32 nodes that are processes of this machine. Needs root. Two cores do not
start 32: Ray's own agents come too late for its raylets, which end and are started again; then it says so.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.report import Ratio, Report
from cluster_tasks.node.dashboard import Dashboard
from cluster_tasks.node.ports import free_port
from cluster_tasks.ray import NODE_AGENT
from lab.dstack.image import VOLUMES
from lab.dstack.lab import Lab, lacking
from lab.waiting import wait_for

ROUNDS = 3
NODES = (2, 8, 32)
DEADLINE = 600  # seconds
JOIN_SECONDS = 240
SLEEP = """type: task
name: bare
nodes: 2
fleets: [lab]
image: flotilla-node:1
user: root
commands: [sleep 600]
volumes: {volumes}
resources: {{cpu: "x86:1..", memory: 1GB.., disk: 100MB..}}
"""


def run() -> Report:
    if reason := lacking():
        raise SystemExit(f"python -m benchmarks dstack: {reason}")
    bare, ray = [], []
    with Lab(hosts=2) as lab:
        lab.stack()
        lab.fleet()
        for _ in range(ROUNDS):  # in turns: a busy minute meets both
            bare.append(bare_seconds(lab))
            ray.append(ray_seconds(lab))
    joined = {count: join_seconds(count) for count in NODES}
    few, more = joined[NODES[0]], joined[NODES[1]]
    if few is None or more is None:
        raise SystemExit(f"python -m benchmarks dstack: not even {NODES[1]} nodes joined within {JOIN_SECONDS} s")
    return Report(
        "dstack",
        [
            Ratio(
                "dstack apply to a whole Ray cluster / to two sleeping containers", statistics.median(ray) / statistics.median(bare), 1.2
            ),
            Ratio("seconds per node of 8 / of 2, the node agent alone", (more / NODES[1]) / (few / NODES[0]), 1.0),
        ],
        {
            "seconds to two sleeping containers": round(statistics.median(bare), 1),
            "seconds to a whole Ray cluster": round(statistics.median(ray), 1),
            "seconds to join by nodes": {
                count: round(seconds, 1) if seconds else f"not within {JOIN_SECONDS}" for count, seconds in joined.items()
            },
        },
        {"bare": bare, "ray": ray, "join": joined},
    )


def bare_seconds(lab: Lab) -> float:
    """Until dstack says that both jobs run."""
    (lab.project / "bare.dstack.yml").write_text(SLEEP.format(volumes=json.dumps(VOLUMES)))
    start = time.monotonic()
    lab.must("dstack apply -y -d -f bare.dstack.yml")
    lab.wait_run("bare", "running")
    taken = time.monotonic() - start
    lab.stop("bare")
    lab.wait_idle()
    return taken


def ray_seconds(lab: Lab) -> float:
    """Until the head's own dashboard shows both nodes."""
    start = time.monotonic()
    lab.must(". build/lab/env.sh; dstack apply -y -d -f build/lab/ray-cluster.dstack.yml")
    dashboard = Dashboard("http://127.0.0.1:8265", (lab.project / "build/lab/ray.token").read_text().strip())

    def whole() -> bool:
        for host in lab.hosts:
            with host.network():
                if len(dashboard.alive_nodes() or ()) == len(lab.hosts):
                    return True
        return False

    wait_for("the Ray cluster", whole, DEADLINE)
    taken = time.monotonic() - start
    lab.stop("ray")
    lab.wait_idle()
    return taken


def join_seconds(count: int) -> float | None:
    """Of as many agents started at once, until the head says that the cluster is whole; None where it is not in time."""
    port, dashboard = free_port(), free_port()
    addresses = ",".join(f"127.0.0.{index + 2}" for index in range(count))
    env = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "FLOTILLA_"))}
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        log = Path(folder) / "head.log"
        common = [sys.executable, str(NODE_AGENT), "--addresses", addresses, "--port", str(port), "--dashboard-port", str(dashboard)]
        common += ["--num-cpus", "1", "--object-store-mb", "80", "--join-timeout", str(DEADLINE)]
        start = time.monotonic()
        with log.open("w") as head:
            agents = [
                subprocess.Popen(
                    [*common, "--rank", str(rank), "--temp-dir", f"{folder}/{rank}"],
                    env=env | {"PATH": f"{Path(sys.executable).parent}:{env['PATH']}"},
                    stdout=head if rank == 0 else subprocess.DEVNULL,
                    stderr=subprocess.STDOUT,
                )
                for rank in range(count)
            ]
        try:
            while "ready: " not in log.read_text():
                if agents[0].poll() is not None:
                    raise RuntimeError(f"the head of {count} nodes has ended:\n{log.read_text()[-2000:]}")
                if time.monotonic() - start > JOIN_SECONDS:
                    return None
                time.sleep(0.1)
            return time.monotonic() - start
        finally:
            for agent in agents:
                agent.terminate()
            for agent in agents:
                agent.wait(60)
