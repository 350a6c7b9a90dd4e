"""A stack of this machine's nodes, rendered into a folder of its own, and the commands by which a person runs and uses it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from cluster_tasks.identity import environment
from cluster_tasks.node.ports import free_port
from cluster_tasks.ray import NODE_AGENT, POOLS, ROLLOUT, SANDBOXES, ray_cluster, rollout_node
from stacks.schema import Stack
from stacks.site import Site

ROOT = Path(__file__).parents[1]
LOCAL = [sys.executable, "-m", "cluster_tasks.local"]
RAY = str(Path(sys.executable).parent / "ray")
# A job gets the project, but not what is large in it.
PROJECT = ("--working-dir", ".", "--runtime-env-json", '{"excludes": ["/.git/", "/.venv/", "/build/", "/tests/"]}')


def command(process: psutil.Process) -> list[str]:
    """Its words; [""] where it has ended meanwhile, which any process of a machine may between a listing and a look."""
    try:
        return process.cmdline() or [""]
    except psutil.Error:
        return [""]


@dataclass(frozen=True)
class Cluster:
    file: Path
    port: int

    @property
    def root(self) -> Path:
        return self.file.parent

    def local(self, command: str, *flags: str) -> subprocess.CompletedProcess[str]:
        """`python -m cluster_tasks.local ...` as a person types it, who tries `up` again where Ray's 30 s for its raylet were too short."""
        done = self._run(*LOCAL, command, str(self.file), *flags, timeout=400)
        if command == "up" and done.returncode and "node timed out during startup" in done.stdout + done.stderr:
            done = self._run(*LOCAL, command, str(self.file), *flags, timeout=400)
        return done

    def scale(self, *counts: str) -> subprocess.CompletedProcess[str]:
        return self._run(*LOCAL, "scale", "--file", str(self.file), *counts, timeout=150)

    def job(self, *command: str, flags: tuple[str, ...] = (), timeout: float = 400) -> subprocess.CompletedProcess[str]:
        """`ray job submit ...`, from the project's folder."""
        line = (RAY, "job", "submit", "--address", self.url, *flags, "--", *command)
        return self._run(*line, timeout=timeout, env=environment(self.root, self.url))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def log(self, name: str) -> str:
        return (self.root / f"logs/{name}.log").read_text()

    def processes(self) -> list[psutil.Process]:
        """The guard and all below it. Not by environment alone: Ray's workers overwrite theirs with their title."""
        guard = psutil.Process(json.loads((self.root / "cluster.json").read_text())["pid"])
        return [guard, *guard.children(recursive=True)]

    @staticmethod
    def _run(*line: str, timeout: float, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SLURM_", "DSTACK_", "FLOTILLA_"))}
        return subprocess.run(line, cwd=ROOT, env=kept | (env or {}), capture_output=True, text=True, timeout=timeout, check=False)


def render(folder: Path, *fleets: dict[str, Any], node_flags: str = "", **settings: Any) -> Cluster:
    """The files that the stack `local` publishes, with a port of their own; `node_flags` are added to the agent's, `settings` to those of
    the task."""
    port = free_port()
    task = {"fleets": [fleet["name"] for fleet in fleets if fleet.get("role") != "rollout"], "dashboard_port": port} | settings
    monitoring = task.pop("monitoring", {})
    stack = Stack.model_validate({"name": "local", "cloud": "local", "fleets": list(fleets), "task": task, "monitoring": monitoring})
    tasks = {f"{fleet.name}{ROLLOUT}": rollout_node(stack, Site(), fleet) for fleet in stack.elastic_fleets()}
    tasks["ray-cluster.dstack.yml"] = rendered = ray_cluster(stack, Site())
    if node_flags:
        rendered["commands"][-1] += node_flags
    root = folder / "build/local"
    root.mkdir(parents=True)
    (folder / "requirements").mkdir()
    shutil.copy(ROOT / "requirements/cpu.txt", folder / "requirements")
    shutil.copytree(NODE_AGENT, root / NODE_AGENT.name)
    shutil.copytree(SANDBOXES, root / NODE_AGENT.name / POOLS)
    for name, written in tasks.items():
        (root / name).write_text(yaml.safe_dump(written, sort_keys=False, width=1000))
    return Cluster(root / "ray-cluster.dstack.yml", port)
