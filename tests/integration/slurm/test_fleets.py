"""A cluster of two fleets as a heterogeneous job on a real Slurm: one Ray cluster, whose nodes differ."""

from __future__ import annotations

import re

import pytest

from lab.slurm.project import SETTINGS, TWO_FLEETS
from lab.waiting import wait_for

pytestmark = pytest.mark.hosts

PLACED = """
import ray
ray.init()
@ray.remote
def address():
    return ray.util.get_node_ip_address()
for kind in ("h100", "v100"):
    print("PLACED", kind, ray.get(address.options(resources={kind: 1}).remote()), ray.cluster_resources()[kind])
"""


def components(slurm, job: str) -> list[str]:
    """The state of each."""
    return re.findall(r"JobState=(\w+)", slurm.run(f"scontrol show job {job}").stdout)


def test_a_job_places_its_actors_on_the_nodes_of_either_fleet(projects, slurm):
    job = (project := projects("fleets", **TWO_FLEETS)).submit("ray-ppo", "python", "-c", PLACED)
    state, log = slurm.ended(job), project.log("ray-ppo", job)
    assert (state["JobState"], state["ExitCode"]) == ("COMPLETED", "0:0"), log
    assert "ready: 3 of 3 nodes, 4 CPUs" in log
    assert re.search(r"^PLACED h100 10\.77\.0\.[12] 16\.0$", log, re.MULTILINE), log
    assert "PLACED v100 10.77.0.3 4.0" in log
    wait_for("the nodes", lambda: slurm.idle() == 3, 240)


def test_cancelling_a_cluster_of_two_fleets_ends_both(projects, slurm):
    job = (project := projects("fleets-cancelled", **TWO_FLEETS)).submit("ray-cluster")
    wait_for("the cluster", lambda: "dashboard  http" in project.log("ray-cluster", job), 180)
    assert components(slurm, job) == ["RUNNING", "RUNNING"]
    slurm.run(f"scancel {job}")
    wait_for("the end of both components", lambda: components(slurm, job) == ["CANCELLED", "CANCELLED"], 240)
    wait_for("the nodes", lambda: slurm.idle() == 3, 240)


def test_torchrun_starts_as_many_ranks_on_each_node_as_it_has_gpus(projects, slurm):
    """GPUs by number and type, which Slurm grants for each component: two on either of two nodes, one on the third."""
    fleets = [fleet | {"gpu": {"name": "H100", "count": count}} for fleet, count in zip(TWO_FLEETS["fleets"], (2, 1), strict=True)]
    project = projects("fleets-torchrun", **TWO_FLEETS | {"fleets": fleets})
    job = project.submit("torchrun", "--no-python", "sh", "-c", 'echo "RANK $RANK of $WORLD_SIZE on $(hostname)"')
    state, log = slurm.ended(job), project.log("torchrun", job)
    assert (state["JobState"], state["ExitCode"]) == ("COMPLETED", "0:0"), log
    ranks = [f"RANK {rank} of 5 on {host}" for rank, host in enumerate(("n1", "n1", "n2", "n2", "n3"))]
    assert sorted(line for line in log.splitlines() if line.startswith("RANK ")) == ranks, log


def test_steps_have_the_environment_where_a_site_gives_jobs_none(projects, slurm):
    project = projects("no-export", slurm=SETTINGS["slurm"], fleets=[{"name": "gpus", "nodes": 2}])
    show = 'echo "RANK $RANK has $FLOTILLA_RUNS $RAY_AUTH_MODE"'
    job = project.submit("torchrun", "--no-python", "sh", "-c", show, SBATCH_EXPORT="NONE")
    state, log = slurm.ended(job), project.log("torchrun", job)
    assert (state["JobState"], state["ExitCode"]) == ("COMPLETED", "0:0"), log
    lines = sorted(line for line in log.splitlines() if line.startswith("RANK "))
    assert lines == [f"RANK {rank} has {project.folder}/runs token" for rank in (0, 1)], log
