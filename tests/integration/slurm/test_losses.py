"""What Slurm and its nodes do to long jobs: preemption, time limits, nodes and heads that die. A minute or more each."""

from __future__ import annotations

import re
import sys

import pytest

from lab.slurm.cluster import ENDED
from lab.slurm.project import TWO_FLEETS
from lab.waiting import wait_for

pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.timeout(2000)]

# Counts on all nodes and keeps each count, until there is a file `enough`; ends when asked, after it has kept where it was.
COUNT = """
import os, signal, time, ray
from pathlib import Path
kept = Path(os.environ["FLOTILLA_RUNS"], "count")
step = int(kept.read_text()) if kept.exists() else 0
asked = []
ray.init()
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))  # Ray has set its own
print("FROM", step, flush=True)
@ray.remote(num_cpus=1)
def more(value):
    return value + 1
while not kept.with_name("enough").exists() and not asked:
    step = ray.get(more.remote(step))
    kept.with_suffix(".part").write_text(str(step))
    kept.with_suffix(".part").replace(kept)
    time.sleep(0.5)
if asked:
    kept.with_name("asked").write_text(str(step))
    raise SystemExit(143)
"""
SETUP = [f". {sys.prefix}/bin/activate"]
LONG = 600  # seconds; Slurm waits before it starts a job again, and Ray takes minutes to start on a busy machine


def count(project) -> int:
    kept = project.folder / "runs/count"
    return int(kept.read_text()) if kept.exists() else 0


def begins(project, job: str) -> list[int]:
    """Where each attempt began to count, by the job's log. Its lines come through the head, some time after they were written."""
    return [int(step) for step in re.findall(r"^FROM (\d+)", project.log("ray-ppo", job), re.MULTILINE)]


def start(project, options: str = "") -> str:
    """A job that counts, and whose first line is in the log: a head that dies takes with it what it had not handed on."""
    (project.folder / "count.py").write_text(COUNT)
    job = project.submit("ray-ppo", "python", "count.py", options=options)

    def counting() -> bool:
        assert project.cluster.state(job)["JobState"] not in ENDED, project.log("ray-ppo", job)
        return count(project) > 2 and begins(project, job) == [0]

    wait_for(f"the first counts of job {job}", counting, LONG)
    return job


def assert_went_on(project, slurm, job: str, *, asked: bool | None) -> str:
    """It counts on after one return to the queue, from where it was. Returns the log. `asked`: to save; None where it may be."""

    def counting() -> bool:
        assert slurm.state(job)["JobState"] not in ENDED, project.log("ray-ppo", job)
        return len(begins(project, job)) == 2 and count(project) > begins(project, job)[1]

    wait_for(f"job {job} to count on", counting, LONG)
    (project.folder / "runs/enough").touch()
    state, log = slurm.ended(job, LONG), project.log("ray-ppo", job)
    assert (state["JobState"], state["ExitCode"], state["Restarts"]) == ("COMPLETED", "0:0", "1"), log
    first, again = begins(project, job)
    assert first == 0 and again > 2, log
    kept = project.folder / "runs/asked"
    assert asked is None or kept.exists() == asked, log
    assert not kept.exists() or int(kept.read_text()) == again, log
    return log


def test_a_preempted_job_saves_makes_way_and_goes_on(projects, slurm):
    project = projects("preempted")
    job = start(project)
    urgent = slurm.run("sbatch --parsable --partition=urgent --nodes=3 --exclusive --output=/dev/null --wrap hostname").stdout.strip()
    assert slurm.ended(urgent, LONG)["JobState"] == "COMPLETED"
    assert_went_on(project, slurm, job, asked=True)


def test_a_job_that_needs_longer_than_its_time_limit_goes_on(projects, slurm):
    project = projects("time-limit")
    job = start(project, options="--signal=B:USR1@75")  # Slurm looks at limits every half minute
    slurm.run(f"scontrol update JobId={job} EndTime=now+100")
    wait_for("the requeue", lambda: slurm.state(job)["Restarts"] == "1", LONG)
    slurm.run(f"scontrol update JobId={job} TimeLimit=15")  # else it would be asked again before it has begun
    log = assert_went_on(project, slurm, job, asked=True)
    assert "back into the queue, time 1 of 10" in log


@pytest.mark.parametrize("victim", ["n1", "n2"], ids=["head", "worker"])
def test_a_node_that_dies_costs_what_was_not_saved(projects, slurm, victim):
    project = projects(f"lost-{victim}")
    job = start(project)
    slurm.power_off(victim)
    try:
        assert_went_on(project, slurm, job, asked=None if victim == "n2" else False)  # a head that lives may ask
    finally:
        slurm.power_on(victim)
        wait_for(f"{victim} to return", lambda: slurm.idle() == 3, LONG)
        slurm.run("scontrol reconfigure")  # Slurm 22.05 forgets to give the places of such a job back: idle nodes take no other


def test_a_node_of_one_fleet_that_dies_ends_both_components_and_the_job_goes_on(projects, slurm):
    project = projects("lost-fleet", **TWO_FLEETS)
    job = start(project)
    slurm.power_off("n3")
    wait_for("the requeue", lambda: slurm.state(job)["Restarts"] == "1", LONG)
    slurm.power_on("n3")
    assert_went_on(project, slurm, job, asked=None)
    wait_for("the nodes", lambda: slurm.idle() == 3, LONG)


def test_a_head_whose_ray_dies_is_started_anew(projects, slurm):
    project = projects("dead-head")
    job = start(project)
    slurm.run(f"srun --jobid={job} --overlap --relative=0 --nodes=1 --ntasks=1 pkill -9 gcs_server")
    log = assert_went_on(project, slurm, job, asked=False)
    assert "Ray ended on this node" in log


def test_a_job_that_is_cancelled_is_not_put_back(projects, slurm):
    project = projects("cancelled")
    job = start(project)
    slurm.run(f"scancel {job}")
    state = slurm.ended(job, LONG)
    assert (state["JobState"], state["Restarts"]) == ("CANCELLED", "0"), project.log("ray-ppo", job)


def test_ppo_learns_on_three_nodes(projects, slurm):
    """The demo's own recipes, both of them, as the script runs them when it is given nothing else; fewer steps."""
    project = projects("ppo", fleets=[{"name": "gpus", "nodes": 3, "cpus": 2}])
    sft = "python -m trainer.train_sft --config trainer/recipes/demo-sft.yaml"
    ppo = "python -m trainer.train_ppo --config trainer/recipes/demo.yaml run.name=ppo trainer.steps=3 trainer.eval_prompts=0"
    more = "rollout.engine=hf log.tensorboard=false"
    job = project.submit("ray-ppo", "sh", "-c", f"{sft} trainer.steps=20 && {ppo} {more}")
    state, log = slurm.ended(job, LONG), project.log("ray-ppo", job)
    assert (state["JobState"], state["ExitCode"]) == ("COMPLETED", "0:0"), log
    assert "ready: 3 of 3 nodes, 6 CPUs" in log
    assert (project.folder / "runs/ppo/model/config.json").is_file()
    assert len((project.folder / "runs/ppo/metrics.jsonl").read_text().splitlines()) >= 3


def test_a_held_cluster_takes_jobs_through_the_tunnel_that_it_prints(projects, slurm):
    """Real sshd on login node and compute node; the printed lines are typed as they are."""
    project = projects("held", slurm={"partition": "gpu", "time": "15:00", "login": "root@ctl", "setup": SETUP})
    config = slurm.ssh()
    job = project.submit("ray-cluster")
    wait_for("the cluster", lambda: "submit     " in project.log("ray-cluster", job), LONG)
    said = dict(line.split(maxsplit=1) for line in project.log("ray-cluster", job).splitlines() if line.startswith(("tunnel ", "submit ")))
    submit = said["submit"].partition(" -- ")[0] + " -- python -c 'print(6 * 7)'"
    tunnel = said["tunnel"].replace("ssh ", f"ssh -F {config} -o ExitOnForwardFailure=yes -f ", 1)
    slurm.run(f"{tunnel} >{project.folder}/tunnel.log 2>&1")  # -f: goes into the background when the forward stands
    done = slurm.run(f"{SETUP[0]} && {submit}", folder=project.folder, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\n42\n" in done.stdout
    refused = slurm.run("curl -s -o /dev/null -w '%{http_code}' http://localhost:8265/api/jobs/", check=False)
    assert refused.stdout in ("401", "403")  # without the token
    slurm.run(f"scancel --batch --signal=USR1 {job}")
    state = slurm.ended(job, LONG)
    assert (state["JobState"], state["ExitCode"], state["Restarts"]) == ("COMPLETED", "0:0", "0"), project.log("ray-cluster", job)


def test_two_jobs_share_their_nodes_and_find_ports_of_their_own(projects, slurm):
    fleet = {"name": "gpus", "nodes": 2, "cpus": 2, "memory": "2GB"}
    shared = {"exclusive": False, "time": "15:00", "sbatch": ["--nodelist=n1,n2"], "setup": SETUP}
    project = projects("sharing", fleets=[fleet], slurm=shared)
    jobs = [project.submit("ray-ppo", "python", "-c", "import ray; ray.init(); print('NODES', len(ray.nodes()))") for _ in range(2)]
    wait_for("both jobs to run at once", lambda: all(slurm.state(job)["JobState"] == "RUNNING" for job in jobs), LONG)
    for job in jobs:
        state, log = slurm.ended(job, LONG), project.log("ray-ppo", job)
        assert (state["JobState"], state["ExitCode"]) == ("COMPLETED", "0:0"), log
        assert "NODES 2" in log
        assert re.search(r"ssh -N -L 8265:127\.0\.0\.1:2\d{4} n1\n", log), log


def test_nodes_that_know_one_another_by_ipv6_alone_are_a_cluster(projects, slurm):
    project, hosts = projects("ipv6"), slurm.folder / "etc/hosts"
    before = hosts.read_text()
    for index in (1, 2, 3):
        slurm.run(f"nsenter --net=/run/netns/n{index} ip -6 addr replace fd00::{index}/64 dev eth0 nodad")
    hosts.write_text(re.sub(r"10\.77\.0\.(\d) n", r"fd00::\1 n", before))  # Slurm itself goes by NodeAddr
    try:
        nodes = "sorted(one['NodeManagerAddress'] for one in ray.nodes())"
        job = project.submit("ray-ppo", "python", "-c", f"import ray; ray.init(); print('NODES', {nodes})")
        state, log = slurm.ended(job, LONG), project.log("ray-ppo", job)
    finally:
        hosts.write_text(before)
    assert state["ExitCode"] == "0:0", log
    assert "NODES ['fd00::1', 'fd00::2']" in log
