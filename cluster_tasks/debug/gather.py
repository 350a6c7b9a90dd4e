"""Runs the probe on every node: from here where the nodes are this machine's, else in a Ray job that takes no CPU.

What is read from here does not ask Ray for anything, and so answers while Ray hangs.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import secrets
import shlex
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cluster_tasks.debug import harvest, probe
from cluster_tasks.debug.stacks import Known
from cluster_tasks.node.dashboard import Dashboard
from stacks.errors import UserError

PREFIX = "flotilla-debug-"  # of the names of our jobs
MARKED = {"flotilla": "debug"}  # lists of jobs leave them out
JOB_SECONDS, LOGS_SECONDS = 60, 180
NODE_SECONDS = 20
NAMES_SECONDS = 3  # names are worth less than an answer
ANSWER = re.compile(r"^flotilla-debug:(\S+)\n", re.MULTILINE)
ENDED = ("SUCCEEDED", "FAILED", "STOPPED")

Nodes = dict[str, dict[str, Any]]

STACKS = "look(node_root(os.getpid()))"
# What Ray and its services have written; secrets that any process of the node was given are out of it.
LOGS = """(lambda secret: harvest(
    [Path(__import__("ray")._private.worker._global_node.get_logs_dir_path()),
     *Path(__import__("ray")._private.worker._global_node.get_session_dir_path()).parent.glob("services-*"),
     *Path(__import__("ray")._private.worker._global_node.get_session_dir_path()).parents[1].glob("services-*")],
    secret) | traces(recorded(), secret))(secrets_of(below(node_root(os.getpid())), also))"""

# What the job runs; `sources`, `call` and `seconds` are set before it. It does to every node what `here` does to this machine's. Its own
# node it reads itself: each process that Ray starts takes seconds on a busy node.
JOB = """
import base64, json, os, zlib, ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On
ray.init(log_to_driver=False, logging_level="ERROR")
def look(sources, call):
    names = {"__name__": "probe"}
    for source in sources:
        exec(source, names)
    return eval(call, names)
def read(result):
    try:
        return result()
    except Exception as error:
        said = (str(error).strip().splitlines() or [""])[-1]
        return {"processes": [], "error": f"{type(error).__name__}: {said}"}
task = ray.remote(num_cpus=0, max_retries=0)(look)
here = ray.get_runtime_context().get_node_id()
nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
asked = {id: task.options(scheduling_strategy=On(id, soft=False)).remote(sources, call) for id in nodes if id != here}
found = {nodes[here]: read(lambda: look(sources, call))}
if asked:
    ray.wait(list(asked.values()), num_returns=len(asked), timeout=seconds)
found |= {nodes[id]: read(lambda: ray.get(ref, timeout=0)) for id, ref in asked.items()}
print("flotilla-debug:" + base64.b64encode(zlib.compress(json.dumps(found).encode())).decode(), flush=True)
"""


class DebugError(UserError):
    """Why nothing can be seen, in one message."""


def agents(guard: int) -> dict[str, int]:
    """The node agents of a cluster of this machine, by rank. Raises DebugError where it has ended."""
    import psutil  # which a laptop that only submits does not have

    children: list[psutil.Process] = []
    found: list[tuple[float, str, int]] = []
    try:
        for supervisor in psutil.Process(guard).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                children += supervisor.children()
        for agent in children:
            with contextlib.suppress(psutil.NoSuchProcess):  # orphans that the supervisor adopted end at any time
                if agent.status() != psutil.STATUS_ZOMBIE and (rank := agent.environ().get("DSTACK_NODE_RANK")):
                    found.append((agent.create_time(), rank, agent.pid))
    except psutil.AccessDenied:
        raise DebugError(f"the cluster's processes belong to another user than you; run this as who started pid {guard}") from None
    except psutil.NoSuchProcess:
        raise DebugError(f"the cluster has ended: there is no process {guard}") from None
    return {rank: pid for _, rank, pid in sorted(found, reverse=True)}  # orphans came later than their node's agent


def here(guard: int) -> Nodes:
    """Of a cluster of this machine, by rank. Raises DebugError where it has ended."""
    ranks = agents(guard)
    with ThreadPoolExecutor() as pool:
        return dict(zip(sorted(ranks), pool.map(lambda rank: probe.look(ranks[rank]), sorted(ranks)), strict=True))


def by_job(dashboard: Dashboard, seconds: float = JOB_SECONDS) -> Nodes:
    """Processes of any cluster, by address. Raises OSError where its dashboard does not answer, DebugError where Ray does not."""
    return _on_every_node(dashboard, STACKS, seconds)


def logs_by_job(dashboard: Dashboard, also: list[str], seconds: float = LOGS_SECONDS) -> Nodes:
    """Texts of every node by name, by address; `also` are variables whose values are secret. Raises as `by_job`."""
    return _on_every_node(dashboard, LOGS.replace("also)", f"{also!r})"), seconds)


def _on_every_node(dashboard: Dashboard, call: str, seconds: float) -> Nodes:
    sources = [Path(module.__file__ or "").read_text() for module in (probe, harvest)]
    code = f"sources = {sources!r}\ncall = {call!r}\nseconds = {NODE_SECONDS}\n{JOB}"
    packed = base64.b64encode(zlib.compress(code.encode())).decode()
    command = f"import base64, zlib; exec(zlib.decompress(base64.b64decode('{packed}')))"
    name = f"{PREFIX}{secrets.token_hex(4)}"
    dashboard.ask("/api/jobs/", {"entrypoint": f"python3 -uc {shlex.quote(command)}", "submission_id": name, "metadata": MARKED})
    deadline, state, said = time.monotonic() + seconds, "PENDING", ""
    while state not in ENDED:
        if time.monotonic() > deadline:
            dashboard.stop(name)
            raise DebugError(f"Ray has not run {name} within {seconds:.0f} s (it is {state}): Ray itself hangs; look at its logs")
        time.sleep(0.2)
        state = dashboard.ask(f"/api/jobs/{name}")["status"]
        said = "" if state == "PENDING" else dashboard.ask(f"/api/jobs/{name}/logs").get("logs") or ""
        if line := ANSWER.search(said):  # Ray takes another second to call the job ended
            return json.loads(zlib.decompress(base64.b64decode(line[1])))
    raise DebugError(f"{name} ended without an answer: {(said.strip().splitlines() or ['no output'])[-1]}")


def known(dashboard: Dashboard) -> dict[tuple[str, int], Known]:
    """What Ray knows of its processes, by address and pid; empty where it does not say it soon."""
    found: dict[tuple[str, int], Known] = {}

    def ask() -> None:
        try:
            for job in dashboard.ask("/api/jobs/"):
                if driver := job.get("driver_info"):
                    name = f"driver of {job.get('submission_id') or driver['id']}"
                    found[driver["node_ip_address"], int(driver["pid"])] = Known(name, driver["id"])
            nodes = dashboard.ask("/api/v0/nodes?limit=10000")["data"]["result"]["result"]
            address = {node["node_id"]: node["node_ip"] for node in nodes}
            actors = dashboard.ask("/api/v0/actors?limit=10000&filter_keys=state&filter_predicates=%3D&filter_values=ALIVE")
            for actor in actors["data"]["result"]["result"]:
                if actor.get("node_id") in address:
                    found[address[actor["node_id"]], actor["pid"]] = Known(actor.get("name") or "", actor.get("job_id") or "")
        except (OSError, KeyError, TypeError, ValueError, UserError):
            return

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(NAMES_SECONDS)
    return dict(found)
