"""Tasks that Ray's distributed debugger holds at an uncaught error, and how to attach to them.

Ray opens a port of debugpy on the node of the task and notes it with the worker: ray/util/debugpy.py. The port wants no password.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cluster_tasks.node.dashboard import Dashboard

ENABLED = {"RAY_DEBUG_POST_MORTEM": "1"}
NEEDS = (
    "a job pauses at an uncaught error of a task where it was submitted by `flotilla submit --post-mortem` and its nodes have debugpy>=1.8"
)


@dataclass(frozen=True)
class Paused:
    task: str
    node: str
    pid: int
    port: int


def runtime_env(file: Path) -> Path:
    """A copy of the file beside it, with the debugger. Raises OSError where there is none."""
    env = yaml.safe_load(file.read_text()) or {}
    copy = file.with_name(f"{file.stem}-post-mortem.yaml")
    copy.write_text(yaml.safe_dump(env | {"env_vars": (env.get("env_vars") or {}) | ENABLED}, sort_keys=False))
    return copy


def paused(dashboard: Dashboard) -> list[Paused]:
    """By node and port. Raises OSError where the dashboard does not answer."""
    workers = _listed(dashboard, "workers")
    tasks = {task.get("worker_id"): task.get("name") for task in _listed(dashboard, "tasks") if task.get("state") == "RUNNING"}
    return found(workers, tasks)


def found(workers: list[dict[str, Any]], tasks: Mapping[Any, Any]) -> list[Paused]:
    held = [worker for worker in workers if (worker.get("num_paused_threads") or 0) > 0 and worker.get("debugger_port")]
    lines = [Paused(tasks.get(w["worker_id"]) or f"worker {w['worker_id']}", w["ip"], w["pid"], w["debugger_port"]) for w in held]
    return sorted(lines, key=lambda line: (line.node, line.port))


def shown(held: list[Paused], tunnel: str | None) -> list[str]:
    """`tunnel`: the host by which ssh reaches the cluster's network; None where this machine is in it."""
    if not held:
        return [f"no task is paused; {NEEDS}"]
    lines = []
    for line in held:
        lines.append(f"{line.task}  node {line.node}, pid {line.pid}, debugpy on {line.node}:{line.port}")
        at = line.node
        if tunnel:
            lines.append(f"  forward  ssh -N -L 127.0.0.1:{line.port}:{line.node}:{line.port} {tunnel}")
            at = "127.0.0.1"
        lines.append(f'  attach   in VS Code by a launch configuration of type debugpy: "connect": {{"host": "{at}", "port": {line.port}}}')
    return lines


def _listed(dashboard: Dashboard, what: str) -> list[dict[str, Any]]:
    answer = dashboard.ask(f"/api/v0/{what}?detail=1&limit=10000")
    try:
        return answer["data"]["result"]["result"]
    except (KeyError, TypeError) as error:  # while it starts it answers with errors
        raise OSError(f"the list of {what} is not there yet") from error
