"""A project on a cluster's shared file system, rendered for a stack of its own."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from cluster_tasks import build_folder, ray
from infra.publish import rendered
from infra.slurm import build as slurm
from lab.slurm.cluster import Cluster
from stacks.schema import Stack
from stacks.site import Site

ROOT = Path(__file__).parents[2]
SETTINGS: dict[str, Any] = {
    "name": "slurm",
    "cloud": "slurm",
    "fleets": [{"name": "gpus", "nodes": 2, "cpus": 1}],
    "slurm": {"partition": "gpu", "time": "15:00", "login": "me@login.example.com", "setup": [f". {sys.prefix}/bin/activate"]},
}  # cpus: what a node of Ray's offers, not what it has
# n3 is the one node of partition `old`.
TWO_FLEETS: dict[str, Any] = {
    "fleets": [
        {"name": "new", "nodes": 2, "cpus": 1, "resources": {"h100": 8}, "slurm": {"sbatch": ["--nodelist=n1,n2"]}},
        {"name": "old", "nodes": 1, "cpus": 2, "resources": {"v100": 4}, "slurm": {"partition": "old"}},
    ],
    "task": {"fleets": ["new", "old"]},
}


class Project:
    """A folder on the shared file system from which a person submits."""

    def __init__(self, cluster: Cluster, folder: Path):
        self.cluster, self.folder = cluster, folder
        folder.mkdir()
        shutil.copytree(ROOT / "trainer", folder / "trainer", ignore=shutil.ignore_patterns("__pycache__"))

    def render(self, **settings: Any) -> None:
        """build/slurm of the stack, as `pulumi up` writes it."""
        stack = SETTINGS | {"checkpoints": {"kind": "shared", "path": str(self.folder / "runs")}} | settings
        parsed = Stack.model_validate(stack)
        files = rendered(parsed, Site(backends=(slurm.backend(parsed),) if parsed.dstack else ()))
        build_folder.write(self.folder / "build/slurm", files | ray.node_agent())

    def submit(self, script: str, *arguments: str, options: str = "", **env: str) -> str:
        """The id of the job."""
        # Nodes have 1 GB of /dev/shm here.
        env = {"FLOTILLA_NODE_ARGS": "--object-store-mb 80", **env}
        command = f"sbatch --parsable {options} build/slurm/{script}.sbatch {shlex.join(arguments)}"
        return self.cluster.run(command, folder=self.folder, env=env).stdout.strip()

    def log(self, script: str, job: str) -> str:
        file = self.folder / f"build/slurm/{script}-{job}.log"
        return file.read_text() if file.exists() else ""
