"""Real containers on a real Slurm: Docker and Podman, with an image that has no program of its own; AMD's devices are device files."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.dstack.image import IMAGE, VOLUMES
from lab.slurm import engines
from lab.slurm.cluster import SYSTEM_PATH
from lab.waiting import wait_for

pytestmark = pytest.mark.hosts

NODES = ("n1", "n2")
DEVICES = "mkdir -p /dev/dri; mknod /dev/kfd c 1 3; mknod /dev/dri/renderD128 c 1 3; chgrp 44 /dev/kfd; chgrp 105 /dev/dri/r*"
# What verl's page on AMD checks by hand once its cluster is up, and the arguments that its trainer is given.
WHO = """
import os, ray, sys
ray.init()
@ray.remote(num_gpus=8)
def within():
    inside = os.path.exists("/.dockerenv") or os.path.exists("/run/.containerenv")
    return os.uname().nodename, inside, os.path.exists("/dev/kfd"), 44 in os.getgroups(), os.environ["GPU_MAX_HW_QUEUES"], os.getpid()
for node in sorted(ray.get([within.remote(), within.remote()])):
    print("WITHIN", *node[:-1])
open(os.environ["FLOTILLA_RUNS"] + "/written", "w").write(" ".join(sys.argv[1:]))
print("GPUS", ray.cluster_resources()["GPU"])
"""


@pytest.fixture(scope="module", params=["docker", "podman"])
def engine(request: pytest.FixtureRequest, slurm) -> Iterator[tuple[str, dict[str, str]]]:
    """The engine on two nodes with AMD's devices, and the environment of its clients."""
    if shutil.which(request.param, path=SYSTEM_PATH) is None:
        pytest.skip(f"{request.param} is not installed; `make test-hosts` installs it as root")
    env = engines.start(slurm, request.param, NODES)
    slurm.run(f"srun --nodelist={','.join(NODES)} -N2 bash -c '{DEVICES}'")
    yield request.param, env
    slurm.run(f"srun --nodelist={','.join(NODES)} -N2 rm -r /dev/kfd /dev/dri")


def settings(engine: tuple[str, dict[str, str]]) -> dict[str, Any]:
    """verl's page, from its first line: nodes, GPUs, time, image, mounts, environment."""
    name, env = engine
    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
    return {
        "fleets": [{"name": "gpus", "nodes": 2, "cpus": 1, "gpu": {"name": "MI300X", "count": 8, "vendor": "amd"}}],
        "slurm": {"container": name, "gpu_type": "h100", "time": "15:00", "sbatch": [f"--nodelist={','.join(NODES)}"]},
        "task": {"image": IMAGE, "volumes": VOLUMES, "env": {"PATH": path} | env},
    }


def containers(slurm, engine: tuple[str, dict[str, str]]) -> list[str]:
    name, env = engine
    return [one for node in NODES for one in slurm.on(node, f"{name} ps --all --format '{{{{.Names}}}}'", env=env).stdout.split()]


def test_verls_job_on_amd_nodes_runs_to_its_end_in_containers(projects, slurm, engine):
    project = projects(f"real-{engine[0]}", **settings(engine))
    node_args = "--object-store-mb 80 --num-gpus 8"  # no GPU that Ray could find
    job = project.submit("ray-ppo", "python3", "-c", WHO, "trainer.nnodes=2", "it's", FLOTILLA_NODE_ARGS=node_args)
    state, log = slurm.ended(job), project.log("ray-ppo", job)
    assert (state["JobState"], state["ExitCode"]) == ("COMPLETED", "0:0"), log
    assert "ready: 2 of 2 nodes, 2 CPUs, 16 GPUs" in log
    assert [line for line in log.splitlines() if line.startswith(("WITHIN", "GPUS"))] == [
        *(f"WITHIN {node} True True True 2" for node in NODES),
        "GPUS 16.0",
    ], log
    assert (project.folder / "runs/written").read_text() == "trainer.nnodes=2 it's"
    wait_for("the containers to be gone", lambda: containers(slurm, engine) == [], 240)


def test_a_container_whose_client_is_killed_ends_with_it(projects, slurm, engine):
    """As Slurm kills clients, 30 s after it has asked a job to end: that of the second node, of which the script hears nothing."""
    name, _ = engine
    project = projects(f"killed-{name}", **settings(engine))
    sleep = ["--nproc-per-node=1", "--no-python", "sh", "-c", "echo STARTED; sleep 1000"]
    job = project.submit("torchrun", *sleep, options="--no-requeue")
    wait_for("both nodes", lambda: project.log("torchrun", job).splitlines().count("STARTED") == 2, 180)
    assert containers(slurm, engine) == [f"flotilla-{job}-{node}" for node in NODES]
    slurm.on("n2", f"pkill -9 -f '{name} run --name=flotilla-{job}'")
    wait_for("the container to be gone", lambda: containers(slurm, engine) == [f"flotilla-{job}-n1"], 240)
    slurm.run(f"scancel --signal=KILL {job}")
    slurm.run(f"scancel {job}")
    wait_for("the other to be gone", lambda: containers(slurm, engine) == [], 240)
    wait_for("the nodes", lambda: slurm.idle() == 3, 240)
