"""From the start of a Slurm job to a whole Ray cluster on three nodes, against `srun hostname` and `ray start` typed by hand.

Both are batch scripts on the cluster of `lab/slurm`, and count from the first line of their log. Needs root.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.report import Ratio, Report
from lab.slurm.cluster import Cluster, lacking
from lab.slurm.project import Project
from lab.waiting import wait_for

ROUNDS = 3
DEADLINE = 600  # seconds
READY = "ready: "
NODES, OBJECT_STORE_MB = 3, 80  # nodes of the tests' cluster have 1 GB of shared memory
# What a person would type: the names of the nodes, the head, the others at once.
BARE = """#!/bin/bash
#SBATCH --nodes=3 --ntasks-per-node=1 --exclusive --output=bare-%j.log
echo begin
. {activate}
export RAY_AUTH_MODE=disabled RAY_USAGE_STATS_ENABLED=0
flags=(--num-cpus 1 --object-store-memory {bytes} --disable-usage-stats --block)
srun --overlap hostname
head=$(scontrol show hostnames | head -n 1)
address=$(getent ahostsv4 "$head" | awk 'NR == 1 {{print $1}}')
srun --overlap --nodes=1 --ntasks=1 --relative=0 ray start --head --node-ip-address "$address" "${{flags[@]}}" >head-$SLURM_JOB_ID &
until grep -q 'Ray runtime started' head-$SLURM_JOB_ID 2>/dev/null; do sleep 0.1; done
srun --overlap --nodes=2 --ntasks=2 --relative=1 ray start --address "$address:6379" "${{flags[@]}}" >others-$SLURM_JOB_ID &
until [ "$(grep -c 'Ray runtime started' others-$SLURM_JOB_ID 2>/dev/null)" = 2 ]; do sleep 0.1; done
echo "ready: "
wait
"""


def run() -> Report:
    if reason := lacking():
        raise SystemExit(f"python -m benchmarks slurm: {reason}")
    bare, ray = [], []
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        cluster = Cluster(Path(folder) / "shared").start()
        try:
            project = Project(cluster, cluster.folder / "project")
            project.render(fleets=[{"name": "gpus", "nodes": NODES, "cpus": 1}])
            (project.folder / "bare.sbatch").write_text(
                BARE.format(activate=Path(sys.prefix) / "bin/activate", bytes=OBJECT_STORE_MB * 2**20)
            )
            for _ in range(ROUNDS):  # in turns: a busy minute meets both
                bare.append(ready_seconds(project, "bare.sbatch", "bare-{}.log"))
                ray.append(ready_seconds(project, "build/slurm/ray-cluster.sbatch", "build/slurm/ray-cluster-{}.log"))
        finally:
            cluster.stop()
    return Report(
        "slurm",
        [
            Ratio(
                "start of a job to a whole Ray cluster of 3 / srun hostname and ray start",
                statistics.median(ray) / statistics.median(bare),
                1.3,
            ),
        ],
        {
            "seconds by hand": round(statistics.median(bare), 1),
            "seconds by the script": round(statistics.median(ray), 1),
        },
        {"bare": bare, "ray": ray},
    )


def ready_seconds(project: Project, script: str, log: str) -> float:
    """From the first byte of the log, which srun or the script writes at once, to its word that the cluster is whole."""
    cluster = project.cluster
    env = {"FLOTILLA_NODE_ARGS": f"--object-store-mb {OBJECT_STORE_MB}"}
    job = cluster.run(f"sbatch --parsable {script}", folder=project.folder, env=env).stdout.strip()
    file = project.folder / log.format(job)
    wait_for(f"the start of job {job}", file.exists, DEADLINE, every=0.02)
    begin = time.monotonic()
    wait_for(f"job {job}", lambda: READY in file.read_text(), DEADLINE, every=0.02)
    taken = time.monotonic() - begin
    cluster.run(f"scancel {job}")
    cluster.ended(job)
    wait_for("idle nodes", lambda: cluster.idle() == NODES, DEADLINE)
    return taken
