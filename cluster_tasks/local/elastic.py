"""The nodes of elastic fleets on this machine: rendered beside the cluster's task, and started as `scale` says."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cluster_tasks.local.plan import OBJECT_STORE_MB, LocalError, ray_folder, read_task, shared_environment
from cluster_tasks.local.supervisor import NodeProcess
from cluster_tasks.ray import RANGE, ROLLOUT
from stacks.dstack_api import TaskConfiguration

SCALE = "scale.json"  # how many nodes of each fleet are wanted; the supervisor reads it
FIRST = 101  # of the last part of their loopback addresses; those of the cluster begin with 127.0.0.2


@dataclass(frozen=True)
class ElasticFleet:
    name: str
    task: TaskConfiguration
    least: int
    most: int

    def check(self, count: int) -> None:
        """Raises LocalError."""
        if not self.least <= count <= self.most:
            raise LocalError(f"{self.name}={count}: fleet {self.name} may have {self.least} to {self.most} nodes (flotilla:fleets[].nodes)")


def elastic_fleets(root: Path) -> dict[str, ElasticFleet]:
    """By name, those whose tasks are rendered in the folder. Raises LocalError."""
    found = {}
    for file in sorted(root.glob(f"*{ROLLOUT}")):
        task, name = read_task(file), file.name.removesuffix(ROLLOUT)
        least, _, most = str(dict(task.env.items())[RANGE]).partition("..")
        found[name] = ElasticFleet(name, task, int(least), int(most))
    return found


def processes(root: Path, cluster: TaskConfiguration, shell: Mapping[str, str]) -> list[NodeProcess]:
    """Of every node that the fleets may have. They see no GPU but those that the shell shows: none is theirs alone."""
    nodes, number = [], FIRST
    for fleet in elastic_fleets(root).values():
        shared = shared_environment(fleet.task, root, shell) | {"DSTACK_RUN_NAME": cluster.name or "local"}
        for index in range(fleet.most):
            name, folder = f"{fleet.name}-{index}", root / f"nodes/{fleet.name}-{index}"
            # By its number: the path of Ray's sockets has no room for a fleet's name.
            flags = {"--address": f"127.0.0.{number}", "--temp-dir": ray_folder(root) / str(number), "--object-store-mb": OBJECT_STORE_MB}
            own = {"FLOTILLA_NODE_ARGS": shlex.join(f"{flag}={value}" for flag, value in flags.items())}
            command = [fleet.task.shell or "/bin/sh", "-c", " && ".join(fleet.task.commands)]
            nodes.append(NodeProcess(index, command, shared | own, str(folder), str(root / f"logs/{name}.log"), fleet.name))
            number += 1
            for mapping in fleet.task.files:
                source, target = root / mapping.local_path, folder / mapping.path
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copytree(source, target) if source.is_dir() else shutil.copy2(source, target)
    return nodes


def wanted(root: Path) -> dict[str, int]:
    """How many nodes of each fleet are to run, as `scale` said last."""
    try:
        return json.loads((root / SCALE).read_text())
    except (OSError, ValueError):
        return {}


def write_wanted(root: Path, counts: Mapping[str, int]) -> None:
    part = root / f".{SCALE}.part"
    part.write_text(json.dumps(dict(counts)))
    part.replace(root / SCALE)
