"""`flotilla debug stacks` of 64 processes on two nodes of this machine: read from here, and by a Ray job as where the nodes are elsewhere.

The processes are those of a job; what Ray runs beside them is read too. Both ways take turns.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.report import Ratio, Report
from cluster_tasks.debug import gather, stacks
from cluster_tasks.identity import KnownDashboard, environment
from cluster_tasks.local.state import Cluster as Running
from lab.local import render
from lab.waiting import wait_for

NODES, PROCESSES, ROUNDS = 2, 64, 5
SECONDS = 10  # that an answer may take
JOB = f"""
import subprocess, sys, time, ray
class Holder:
    def hold(self, processes):
        self.held = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"]) for _ in range(processes)]
ray.init()
holders = [ray.remote(num_cpus=1)(Holder).remote() for _ in range({NODES})]
ray.get([holder.hold.remote({PROCESSES // NODES}) for holder in holders])
print("HELD", flush=True)
time.sleep(3600)
"""


def run() -> Report:
    with tempfile.TemporaryDirectory(prefix="flotilla-debug-") as folder:
        cluster = render(Path(folder), {"name": "laptop", "nodes": NODES, "cpus": 1})
        done = cluster.local("up")
        if done.returncode:
            raise RuntimeError(f"the cluster did not start: {done.stderr}")
        try:
            asked = KnownDashboard.of(cluster.url, environment(cluster.root, cluster.url))
            (script := Path(folder) / "hold.py").write_text(JOB)
            job = asked.ask("/api/jobs/", {"entrypoint": f"{sys.executable} {script}"})["submission_id"]
            wait_for("the processes", lambda: "HELD" in (asked.ask(f"/api/jobs/{job}/logs").get("logs") or ""), 180)
            running = Running.running(cluster.root)
            assert running
            ways = {"from here": lambda: gather.here(running.pid), "by a Ray job": lambda: gather.by_job(asked)}
            taken: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(ROUNDS):
                for way, read in ways.items():
                    taken[way].append(seconds(read, asked))
        finally:
            cluster.local("down", "--timeout", "20")
    ratios = [Ratio(f"seconds for the stacks of {PROCESSES} processes, {way}", statistics.median(taken[way]), SECONDS) for way in ways]
    return Report("debug", ratios, {way: f"{min(each):.1f} to {max(each):.1f} s" for way, each in taken.items()}, {"seconds": taken})


def seconds(read: Callable[[], gather.Nodes], asked: KnownDashboard) -> float:
    """To a page of text. Raises RuntimeError where processes are not in it."""
    began = time.perf_counter()
    found = stacks.processes(read(), gather.known(asked))
    page = list(stacks.shown(found, everything=True))
    taken = time.perf_counter() - began
    if sum(not process.error for process in found) < PROCESSES or not page:
        raise RuntimeError(f"{len(found)} processes were found, of {PROCESSES} and Ray's own; the last lines: {page[-3:]}")
    return taken
