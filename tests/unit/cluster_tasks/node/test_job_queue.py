"""The queue's decisions and its rounds, on a cluster that is played."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster_tasks.node.job_queue.jobs import Job, JobError, Record, Size, misfits
from cluster_tasks.node.job_queue.keeper import Rules
from cluster_tasks.node.job_queue.planner import plan
from cluster_tasks.node.job_queue.service import submitted
from cluster_tasks.node.job_queue.shares import Cluster, Owner, credited, entitled
from lab.played_queue import PlayedQueue

RULES = Rules("onprem", min_run=60)
GIVEN = {"name": "a", "command": "python -m trainer.train_ppo", "owner": "ann", "sizes": [{"gpus": 8, "cpus": 8}]}


def record(name: str, gpus: float, order: int, priority: int = 50, owner: str = "ann", **more: Any) -> Record:
    job = Job.of(GIVEN | {"name": name, "owner": owner, "priority": priority, "sizes": [{"gpus": gpus, "cpus": 1}]})
    return Record(job, order, 0.0, priority=priority, **more)


def running(name: str, gpus: float, order: int, **more: Any) -> Record:
    return record(name, gpus, order, state="running", size=Size(gpus, 1), **more)


def acts(found: list[Any]) -> list[tuple[str, str]]:
    return [(each.action, each.job) for each in found]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"name": ""}, "name: '' is not a text that says something"),
        ({"name": "a b"}, "name: 'a b' is not 1 to 80 letters"),
        ({"name": "a" * 81}, "is not 1 to 80 letters"),
        ({"name": "../a"}, "is not 1 to 80 letters"),
        ({"command": " "}, "command: ' ' is not a text"),
        ({"owner": None}, "owner: None is not a text"),
        ({"priority": 101}, "priority: 101 is not a whole number from 0 to 100"),
        ({"priority": -1}, "priority: -1 is not"),
        ({"priority": 5.5}, "priority: 5.5 is not"),
        ({"priority": True}, "priority: True is not"),
        ({"prioritie": 5}, "prioritie: is no setting of a job; there are budget_gpu_hours"),
        ({"deadline": 0}, "deadline: 0 is not a number > 0"),
        ({"deadline": float("nan")}, "deadline: nan is not"),
        ({"budget_usd": -3}, "budget_usd: -3 is not"),
        ({"budget_gpu_hours": "3"}, "budget_gpu_hours: '3' is not"),
        ({"seconds": float("inf")}, "seconds: inf is not"),
        ({"runtime_env": []}, "runtime_env: [] is not a map"),
        ({"metadata": "x"}, "metadata: 'x' is not a map"),
        ({"driver": 1}, "driver: 1 is not a bool"),
        ({"stack": 1}, "stack: 1 is not a str"),
        ({"sizes": []}, "sizes: [] is not a list of 1 to 64 sizes"),
        ({"sizes": 8}, "sizes: 8 is not a list"),
        ({"sizes": [8]}, "sizes: 8 is not a map of gpus, cpus and settings"),
        ({"sizes": [{"gpu": 8}]}, "is not a map of gpus, cpus and settings"),
        ({"sizes": [{"gpus": -1}]}, "sizes: gpus -1 is not a number >= 0"),
        ({"sizes": [{"gpus": 0}]}, "sizes: neither GPUs nor CPUs"),
        ({"sizes": [{"gpus": 1, "settings": ["a b"]}]}, "sizes: settings ['a b'] is not a list of key=value"),
        ({"sizes": [{"gpus": 1, "settings": ["x='; rm -rf /'"]}]}, "is not a list of key=value"),
        ({"sizes": [{"gpus": 2}, {"gpus": 4}]}, "sizes: 4 GPUs after 2 GPUs; each has to take less"),
        ({"sizes": [{"gpus": 2}, {"gpus": 2}]}, "each has to take less"),
        ({"sizes": [{"gpus": 2}, {"gpus": 1}], "command": "python x.py"}, "sizes: several are for `-m trainer.train_*`"),
        ({"sizes": [{"cpus": 2}], "budget_gpu_hours": 3}, "budget_gpu_hours: 3 never ends for a job without GPUs"),
    ],
)
def test_a_mistake_in_a_job_is_one_line(more: dict[str, Any], said: str) -> None:
    with pytest.raises(JobError) as error:
        Job.of(GIVEN | more)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"sizes": [{"gpus": 9}]}, "sizes: the job takes at least 9 GPUs, and the cluster has 8: it would never start"),
        ({"sizes": [{"cpus": 2e6}]}, "takes at least 2e+06 CPUs"),
        ({"owner": "bob", "sizes": [{"gpus": 5}]}, "the quota of bob is 4: it would never start"),
        ({"stack": "aws"}, "stack: the job is for aws, this is the queue of onprem"),
        ({"budget_usd": 5}, "budget_usd: 5, but nobody says what a node costs; set flotilla:monitoring.price"),
        ({"budget_gpu_hours": 0.5, "step_seconds": 600}, "budget_gpu_hours: 0.5 is less than one step takes, about 1.33 GPU hours"),
        ({"name": "first"}, "name: the queue has had a job first (running)"),
        ({"runtime_env": {"working_dir": "gcs://_ray_pkg_1.zip"}}, "runtime_env: _ray_pkg_1.zip was not uploaded to the queue"),
    ],
)
def test_what_can_never_run_here_is_refused(tmp_path: Path, more: dict[str, Any], said: str) -> None:
    queue = PlayedQueue.made(tmp_path, 8, RULES)
    queue.keeper.owner("bob", {"quota": 4})
    queue.submit("first", 1000, 8)
    queue.play(2)
    with pytest.raises(JobError) as error:
        queue.keeper.submit(Job.of(GIVEN | more))
    assert said in str(error.value)


def test_a_budget_below_one_step_is_refused() -> None:
    job = Job.of(GIVEN | {"budget_usd": 1.0, "step_seconds": 900.0})
    assert [*misfits(job, 16, 64, None, 16.0, "")] == ["budget_usd: 1 is less than one step takes, about 2 USD"]
    assert not [*misfits(job, 16, 64, None, 7.0, "")]


def test_ray_submits_by_its_own_request() -> None:
    job = submitted({"entrypoint": "python x.py", "submission_id": "x", "metadata": {"owner": "ann"}, "entrypoint_num_gpus": 2}, "s")
    assert (job.name, job.owner, job.sizes, job.driver) == ("x", "ann", (Size(2, 0),), True)
    own = json.dumps({"sizes": [{"gpus": 4}], "priority": 9})
    job = submitted({"entrypoint": "python -m trainer.train_ppo", "submission_id": "x", "metadata": {"queue": own, "commit": "1"}}, "s")
    assert (job.priority, job.sizes, job.driver, dict(job.metadata)) == (9, (Size(4, 0),), False, {"commit": "1"})
    for metadata in ({"queue": "{"}, {"queue": "[]"}, {"queue": 1}, []):
        with pytest.raises(JobError):
            submitted({"entrypoint": "x", "submission_id": "x", "metadata": metadata or ["x"]}, "s")


def test_a_dearer_job_takes_the_place_of_the_cheapest_that_suffices() -> None:
    low, mid, big = (
        running(name, gpus, order, priority=of) for name, gpus, order, of in (("low", 2, 1, 5), ("mid", 2, 2, 10), ("big", 4, 3, 20))
    )
    new = record("new", 4, 4, priority=90, since=1000.0)
    assert acts(plan(Cluster(8, 64), [low, mid, big, new], {}, 1000)) == [("pause", "low"), ("pause", "mid"), ("wait", "new")]
    less = record("new", 2, 4, priority=90, since=1000.0)
    assert acts(plan(Cluster(8, 64), [low, mid, big, less], {}, 1000)) == [("pause", "low"), ("wait", "new")]


def test_what_has_just_started_and_what_is_dearer_stays() -> None:
    new = record("new", 8, 2, priority=90, since=100.0)
    [found] = plan(Cluster(8, 64), [running("low", 8, 1, priority=5, started=50.0), new], {}, 100)
    assert "low has run for too short a time" in found.reason
    [found] = plan(Cluster(8, 64), [running("old", 8, 1, priority=91), new], {}, 1000)
    assert "old goes first" in found.reason


def test_ageing_pauses_a_run_but_not_what_would_lose_its_work() -> None:
    waits = record("waits", 8, 2, since=0.0)
    run = running("run", 8, 1)
    assert acts(plan(Cluster(8, 64), [run, waits], {}, 5.5 * 3600)) == [("pause", "run"), ("wait", "waits")]
    plain = Job.of(GIVEN | {"name": "run", "command": "python x.py"})
    loses = Record(plain, 1, 0.0, state="running", size=Size(8, 1))
    assert acts(plan(Cluster(8, 64), [loses, waits], {}, 5.5 * 3600)) == [("wait", "waits")]


def test_small_jobs_do_not_starve_a_large_one() -> None:
    """What is freed for it is kept for it."""
    low = record("low", 8, 1, priority=10, state="pausing", size=Size(8, 1))
    large, small = record("large", 8, 2, priority=90), record("small", 1, 3, priority=50)
    assert acts(plan(Cluster(9, 64), [low, large, small], {}, 1000)) == [("wait", "large"), ("start", "small")]
    assert acts(plan(Cluster(8, 64), [low, large, small], {}, 1000)) == [("wait", "large"), ("wait", "small")]
    half = record("half", 4, 1, priority=10, state="pausing", size=Size(4, 1))
    assert acts(plan(Cluster(8, 64), [half, large, small], {}, 1000)) == [("wait", "large"), ("wait", "small")]


def test_shares_follow_weights_and_what_one_leaves_goes_to_the_others() -> None:
    owners = {"ann": Owner(2.0), "bob": Owner(1.0), "cyd": Owner(1.0, quota=1.0)}
    jobs = [record(f"{owner}{n}", 8, n, owner=owner) for n, owner in enumerate(["ann", "ann", "bob", "cyd"])]
    assert entitled(Cluster(10, 64), jobs, owners) == {"ann": 6.0, "bob": 3.0, "cyd": 1.0}
    after = credited(Cluster(10, 64), [running("ann0", 8, 0, owner="ann"), *jobs[2:3]], owners, 60)
    assert after["ann"].owed < 0 < after["bob"].owed
    assert sum(each.owed for each in after.values()) == pytest.approx(0.0)


def test_a_quota_holds_and_other_jobs_count() -> None:
    owners = {"ann": Owner(quota=4.0)}
    [first, second] = plan(Cluster(8, 64), [record("a", 4, 1), record("b", 4, 2)], owners, 0)
    assert (first.action, second.action) == ("start", "wait")
    assert second.reason == "the quota of ann is 4 GPUs, and its jobs have 4"
    [found] = plan(Cluster(8, 64, other_gpus=6), [record("a", 4, 1)], {}, 0)
    assert "jobs submitted by hand have 6 GPUs" in found.reason
