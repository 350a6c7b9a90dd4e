"""Node agents by the hundred on this machine, with a stand-in for Ray: how long they take to join, when the loss of one is named, and
what the head does per second, with 16 of them and with 256. Then a head alone whose 4,096 nodes are played: each is an address that this
machine answers for, and a connection to the stand-in.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.report import Ratio, Report
from cluster_tasks.node.ports import free_port
from cluster_tasks.ray import NODE_AGENT
from lab import ray_stand_in
from lab.waiting import wait_for

FEW, MANY, PLAYED = 16, 256, 4096
JOIN_SECONDS, NAMED_SECONDS = 300, 30
QUIET_SECONDS = 40  # for which the head's work is measured


@dataclass(frozen=True)
class Cluster:
    agents: list[subprocess.Popen[bytes]]
    log: Path  # the head's
    played: list[socket.socket]

    def said(self, pattern: str) -> bool:
        if self.agents[0].poll() is not None:
            raise RuntimeError(f"the head has ended:\n{self.log.read_text()[-2000:]}")
        return re.search(pattern, self.log.read_text()) is not None

    def lose_last(self) -> None:
        if self.played:
            self.played[-1].shutdown(socket.SHUT_WR)
        else:
            os.killpg(self.agents[-1].pid, signal.SIGKILL)

    def head_seconds(self) -> float:
        """CPU seconds so far of the head's agent and of what guards its dashboard's port, without Ray."""
        head = psutil.Process(self.agents[0].pid)
        own = [head, *(child for child in head.children() if any("identity.py" in word for word in child.cmdline()))]
        return sum(times.user + times.system for times in (process.cpu_times() for process in own))


def run() -> Report:
    few, many, played = measured(FEW), measured(MANY), measured(PLAYED, agents=1)
    return Report(
        "nodes",
        [
            Ratio(f"head's CPU seconds per second with {MANY} nodes / with {FEW}", many["head"] / few["head"], 1.5),
            Ratio(f"seconds until the loss of one of {MANY} nodes is named / {NAMED_SECONDS}", many["named"] / NAMED_SECONDS, 1.0),
            Ratio(f"head's CPU seconds per second with {PLAYED} played nodes / with {FEW}", played["head"] / few["head"], 3.0),
            Ratio(f"seconds until the loss of one of {PLAYED} nodes is named / {NAMED_SECONDS}", played["named"] / NAMED_SECONDS, 1.0),
        ],
        {
            f"{count} nodes": {name: round(value, 4) for name, value in found.items()}
            for count, found in ((FEW, few), (MANY, many), (PLAYED, played))
        },
    )


def measured(count: int, agents: int | None = None) -> dict[str, float]:
    """`joined`: seconds from the start of the first agent; `head`: CPU seconds per second; `named`: seconds from a kill to the line.

    Beyond the first `agents` the nodes are played.
    """
    start = time.monotonic()
    with cluster(count, agents or count) as nodes:
        wait_for(f"{count} nodes", lambda: nodes.said("ready: "), JOIN_SECONDS)
        joined = time.monotonic() - start
        before, since = nodes.head_seconds(), time.monotonic()
        time.sleep(QUIET_SECONDS)
        head = (nodes.head_seconds() - before) / (time.monotonic() - since)
        nodes.lose_last()
        killed = time.monotonic()
        wait_for("the lost node's name", lambda: nodes.said(rf"lost node {count - 1} "), 4 * NAMED_SECONDS)
        return {"joined": joined, "head": head, "named": time.monotonic() - killed}


@contextlib.contextmanager
def cluster(count: int, agents_count: int) -> Iterator[Cluster]:
    """As many nodes as this, each with an address of its own, inside the `with`; those beyond the first are played."""
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    port, dashboard = free_port(), free_port()
    addresses = ",".join(f"127.0.{1 + index // 200}.{1 + index % 200}" for index in range(count))
    env = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "FLOTILLA_"))}
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        ray_stand_in.install(Path(folder))
        log = Path(folder) / "head.log"
        common = [sys.executable, str(NODE_AGENT), "--addresses", addresses, "--port", str(port), "--dashboard-port", str(dashboard)]
        common += ["--num-cpus", "1", "--join-timeout", str(JOIN_SECONDS), "--temp-dir", folder]
        agents: list[subprocess.Popen[bytes]] = []
        try:
            with log.open("w") as head:
                for rank in range(agents_count):
                    output = head if rank == 0 else subprocess.DEVNULL
                    command = [*common, "--rank", str(rank)]
                    path = {"PATH": f"{folder}:{env['PATH']}"}
                    agents.append(
                        subprocess.Popen(command, env=env | path, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
                    )
            played = [play(address, addresses.split(",")[0], port) for address in addresses.split(",")[agents_count:]]
            yield Cluster(agents, log, played)
        finally:
            for agent in agents:
                agent.terminate()
            for agent in agents:
                agent.wait(60)


def play(address: str, head: str, port: int) -> socket.socket:
    """What a worker's `ray start` of the stand-in is to its head."""
    deadline = time.monotonic() + JOIN_SECONDS
    while True:
        try:
            node = socket.create_connection((head, port), timeout=JOIN_SECONDS)
            break
        except ConnectionRefusedError:  # it starts
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
    node.sendall(f"{address}\n".encode())
    return node
