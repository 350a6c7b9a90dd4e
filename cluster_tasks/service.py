"""The rendered task of a cluster -> a dstack service: one node of its first fleet serves a model behind the project's gateway.

https://dstack.ai/docs/concepts/services
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Any

from cluster_tasks.ray import PROJECT, brought_from_project

KEY = "VLLM_API_KEY"  # which `dstack apply` takes from the shell
PORT = 8000
FOLDERS = ("trainer", "serving", "cluster_tasks")  # of the project, that the server needs
OF_A_TASK = ("nodes", "ports", "groups", "startup_order", "stop_criteria", "utilization_policy", "max_duration", "schedule")
RUN_NAME = 41  # letters that dstack allows


def service(task: dict[str, Any], name: str, models: Sequence[str], flags: Sequence[str], gpus: int | None) -> dict[str, Any]:
    """`flags`: more for serving.serve. Its own token is asked for in place of dstack's, which would take the same header."""
    first = task["groups"][0] if task.get("groups") else task
    count = gpus if gpus is not None else int(_gpus(first["resources"]) > 0)
    own = ["--name", name, "--here", "--port", str(PORT), "--gpus", str(count)]
    cut = flags.index("--") if "--" in flags else len(flags)
    words = ["python", "-m", "serving.serve", *models, *own, *flags[:cut], *flags[cut:]]
    kept = {key: value for key, value in task.items() if key not in (*OF_A_TASK, "type", "name", "commands", "resources", "env", "files")}
    return {
        "type": "service",
        "name": run_name(task["name"], name),
        **kept,
        "files": [*task.get("files", []), *brought_from_project(FOLDERS)],
        "env": [*(line for line in task["env"] if not line.startswith(("FLOTILLA_TOKEN_", "RAY_AUTH_MODE"))), KEY],
        "commands": [*first["commands"][:-1], f"cd {PROJECT}", f"exec {shlex.join(words)}"],
        "port": PORT,
        "auth": False,
        "probes": [{"type": "http", "url": "/health", "interval": "15s"}],
        "resources": {"gpu": _with_count(first["resources"].get("gpu"), count), "shm_size": first["resources"]["shm_size"]},
    }


def run_name(task: str, name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", f"{task}-serve-{name}".lower())[:RUN_NAME].rstrip("-")


def _gpus(resources: dict[str, Any]) -> int:
    """Of `nvidia:H100:80GB:8`, `H100:1..8` or 0."""
    last = str(resources.get("gpu") or 0).rpartition(":")[2].partition("..")[0]
    return int(last) if last.isdecimal() else 1


def _with_count(gpu: Any, count: int) -> Any:
    """The same kind of GPU, so many of them."""
    kind, _, last = str(gpu or "").rpartition(":")
    named = kind if re.fullmatch(r"[\d.]+", last) else str(gpu or "")
    return f"{named}:{count}" if count and named and gpu else count
