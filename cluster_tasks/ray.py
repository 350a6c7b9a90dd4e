"""Stack and Site -> the dstack task that starts a Ray cluster, and the runtime environment of jobs on it.

Every node runs the node agent, node.py, which learns from dstack's environment which node it is.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from cluster_tasks import fabric
from infra.site import Site
from stacks.schema import Checkpoints, Fleet, Stack

CHECKPOINTS = "/checkpoints"  # the same path inside every node, whatever is mounted there
DASHBOARD_PORT = 8265  # inside the node; flotilla:task.dashboard_port is where a person finds it
NODE_AGENT = Path(__file__).with_name("node.py")  # published beside the task file, which names it under `files`
STOP_SECONDS = 120  # a stopped job may take this long to save a checkpoint
SHM = "8GB"  # container engines give 64 MB, where Ray's object store and NCCL need gigabytes; a limit, nothing is reserved


def ray_cluster(stack: Stack, site: Site) -> dict[str, Any]:
    """The task for `dstack apply -f`: head and workers on the nodes of the first fleet (dstack places a run in one fleet).

    Raises ValueError where no image can run on these GPUs, or the checkpoints' volume has no name.
    """
    fleet, task = site.equipped(stack.fleets[0]), stack.task
    if task.image is None and fleet.gpu is not None and fleet.gpu.vendor == "amd":
        raise ValueError("flotilla:task.image is missing; dstack's own image has no ROCm, so AMD GPUs need an image with Ray and ROCm")
    own_port = task.dashboard_port == DASHBOARD_PORT
    settings = {
        "type": "task",
        "name": task.name,
        "nodes": fleet.nodes,
        "fleets": [fleet.name],
        **_software(stack, fleet),
        "user": task.user,
        "privileged": bool(site.mount) or None,
        "shell": "bash",
        "env": _environment(stack, site),
        "commands": [*site.mount, *site.setup, *_commands(stack, fleet)],
        "ports": [DASHBOARD_PORT if own_port else f"{task.dashboard_port}:{DASHBOARD_PORT}"],
        "volumes": [*([] if site.mount else [_mount(stack.checkpoints)]), *site.volumes, *task.volumes] or None,
        "resources": fleet.requirements() | {"shm_size": task.shm_size or SHM},
        # dstack takes silence for on-demand, and then refuses the fleet's spot instances.
        "spot_policy": "spot" if fleet.capacity.kind == "spot" and fleet.provision == "dstack" else None,
        "startup_order": "any",  # workers wait for the head themselves
        "stop_criteria": "master-done",
        "retry": {"on_events": ["interruption", "error"], "duration": "1h"} if task.retry else None,
        "max_duration": task.max_duration,
    }
    return {key: value for key, value in settings.items() if value is not None}


def runtime_env(stack: Stack, site: Site) -> dict[str, Any]:
    """For `ray job submit --runtime-env`: what jobs need beyond the environment of the nodes, which they inherit."""
    return {
        "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_SECONDS)},
        # Ray uploads the working directory; none of these belongs on a cluster.
        "excludes": ["/.git/", "/.venv/", "/build/", "/tests/", "__pycache__/"],
    }


def demo_job(on_gpus: bool) -> str:
    """What a person submits first on a new cluster: the demo start to end, which needs no download."""
    gpus = " placement.gpus_per_rank=1" if on_gpus else ""
    warm_start = f"python -m trainer.train_sft --config trainer/recipes/demo-sft.yaml{gpus}"
    return f"sh -c '{warm_start} && python -m trainer.train_ppo --config trainer/recipes/demo.yaml{gpus}'"


def _software(stack: Stack, fleet: Fleet) -> dict[str, Any]:
    """An image is expected to contain Ray; dstack's own gets the locked requirements when it starts."""
    if stack.task.image is not None:
        return {"image": stack.task.image, "files": [NODE_AGENT.name]}
    lock = "gpu" if fleet.gpu is not None and fleet.gpu.count else "cpu"
    return {"python": "3.11", "files": [NODE_AGENT.name, f"../../requirements/{lock}.txt:requirements.txt"]}


def _commands(stack: Stack, fleet: Fleet) -> list[str]:
    install = "command -v ray >/dev/null || uv pip install --quiet --requirement requirements.txt"
    return [*([] if stack.task.image else [install]), "exec " + shlex.join(["python3", NODE_AGENT.name, *flags(stack, fleet)])]


def flags(stack: Stack, fleet: Fleet) -> list[str]:
    """Only what differs from the agent's defaults, so that the command stays readable."""
    flags: list[str] = []
    if fleet.cpus is not None:
        flags += ["--num-cpus", str(fleet.cpus)]
    if fleet.resources:
        flags += ["--resources", json.dumps(fleet.resources)]
    if stack.task.join_timeout != type(stack.task).model_fields["join_timeout"].default:
        flags += ["--join-timeout", str(stack.task.join_timeout)]
    if stack.task.on_node_loss != "fail":
        flags += ["--on-node-loss", stack.task.on_node_loss]
    return flags


def _environment(stack: Stack, site: Site) -> list[str]:
    """`NAME=value` lines; a bare name is taken from the shell of the person who applies."""
    env: dict[str, str | None] = {"FLOTILLA_RUNS": CHECKPOINTS}
    if site.leaves_machine:
        env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": None}
    env |= site.env | {name: one.value for name, one in fabric.environment(stack, stack.fleets[0]).items()}
    return [name if value is None else f"{name}={value}" for name, value in env.items()]


def _mount(checkpoints: Checkpoints) -> str:
    if checkpoints.kind != "network":
        return f"{checkpoints.path}:{CHECKPOINTS}"
    if checkpoints.volume is None:
        raise ValueError("flotilla:checkpoints.volume is missing; kind: network needs the name of the dstack volume")
    return f"{checkpoints.volume}:{CHECKPOINTS}"
