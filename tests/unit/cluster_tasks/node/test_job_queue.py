"""The queue's decisions and its rounds, on a cluster that is played."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from cluster_tasks.node.job_queue.forecast import forecast
from cluster_tasks.node.job_queue.jobs import Job, JobError, Record, Size
from cluster_tasks.node.job_queue.keeper import Rules
from cluster_tasks.node.job_queue.planner import plan
from cluster_tasks.node.job_queue.service import submitted
from cluster_tasks.node.job_queue.shares import Cluster, Owner, credited, entitled
from cluster_tasks.node.job_queue.store import Store, StoreError
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


def test_a_job_starts_smaller_and_grows_when_nobody_waits(tmp_path: Path) -> None:
    queue = PlayedQueue.made(tmp_path, 8, RULES)
    queue.submit("first", 600, 4)
    queue.submit("wide", 20000, 8, least=2)
    queue.play(10)
    assert queue.keeper.records["wide"].gpus == 4
    queue.play(2700, 5)
    assert queue.keeper.records["wide"].gpus == 8
    assert any("grows from 4 GPUs to 8 GPUs" in each["reason"] for each in queue.keeper.store.decisions("wide"))


def test_a_run_is_paused_comes_back_and_loses_nothing(tmp_path: Path) -> None:
    queue = PlayedQueue.made(tmp_path, 8, RULES)
    queue.submit("low", 2000, 8, priority=10)
    queue.play(100)
    queue.submit("high", 500, 8, priority=90)
    queue.play(5)
    assert (queue.state("low"), queue.state("high")) == ("pausing", "waiting")
    queue.play(60)
    assert (queue.state("low"), queue.state("high")) == ("paused", "running")
    queue.play(3000, 2)
    assert (queue.state("low"), queue.state("high")) == ("succeeded", "succeeded")
    low = queue.keeper.records["low"]
    assert (low.attempt, low.pauses, low.step) == (2, 1, 66)
    assert sum(low.spent[each] for each in ("running", "pausing")) == pytest.approx(2000 + 2 * 30, abs=40)  # its work and two starts
    assert low.gpu_seconds["running"] == pytest.approx(8 * low.spent["running"])


@pytest.mark.parametrize("after", range(0, 240, 12))
def test_a_queue_that_is_killed_goes_on_where_it_was(tmp_path: Path, after: int) -> None:
    """At any point, also twice; every job ends once, and with all its work."""
    queue = PlayedQueue.made(tmp_path, 8, RULES)
    queue.submit("low", 300, 8, priority=10)
    queue.play(70)
    queue.submit("high", 60, 8, priority=90)
    queue.play(after)
    queue = queue.reopened(tmp_path)
    queue.play(3)
    queue = queue.reopened(tmp_path)
    queue.play(900)
    assert {name: (each.state, each.attempt) for name, each in queue.keeper.records.items()} == {
        "low": ("succeeded", 2),
        "high": ("succeeded", 1),
    }
    assert queue.ray.done["low"] >= 300


def test_a_new_head_starts_again_what_the_old_one_ran(tmp_path: Path) -> None:
    queue = PlayedQueue.made(tmp_path, 8, RULES)
    queue.submit("a", 300, 8)
    queue.play(50)
    queue.ray.attempts.clear()
    queue = queue.reopened(tmp_path)
    queue.play(20)
    assert queue.keeper.records["a"].submission == "a.2"
    queue.play(400)
    assert queue.state("a") == "succeeded"


def test_a_job_that_ignores_sigterm_is_killed_and_that_is_said(tmp_path: Path) -> None:
    queue = PlayedQueue.made(tmp_path, 8, RULES, deaf={"low"})
    queue.submit("low", 1000, 8, priority=10)
    queue.play(100)
    queue.submit("high", 100, 8, priority=90)
    queue.play(140)
    assert queue.state("high") == "running"
    assert any("was killed: it did not end within 120 s" in each["reason"] for each in queue.keeper.store.decisions("low"))


def test_a_victim_that_dies_while_it_saves_and_a_newcomer_that_dies_while_it_starts(tmp_path: Path) -> None:
    queue = PlayedQueue.made(tmp_path, 8, RULES)
    queue.submit("low", 300, 8, priority=10)
    queue.play(100)
    queue.submit("high", 100, 8, priority=90)
    queue.play(3)
    queue.ray.die("low.1")
    queue.play(3)
    assert (queue.state("low"), queue.state("high")) == ("paused", "running")
    assert queue.keeper.records["low"].reason.startswith("takes 8 GPUs")
    assert any("it ended with -9 after" in each["reason"] for each in queue.keeper.store.decisions("low"))
    queue.ray.die("high.1")
    queue.play(3)
    assert queue.keeper.records["high"].submission == "high.2"
    queue.play(900)
    assert (queue.state("low"), queue.state("high")) == ("succeeded", "succeeded")


def test_two_owners_who_both_need_everything_take_turns(tmp_path: Path) -> None:
    queue = PlayedQueue.made(tmp_path, 8, Rules(min_run=600), start_seconds=60.0)
    for owner in ("ann", "bob"):
        queue.submit(owner, 48 * 3600, 8, owner)
    queue.play(24 * 3600, 60)
    had = [sum(queue.keeper.records[owner].gpu_seconds.values()) for owner in ("ann", "bob")]
    assert had[0] / sum(had) == pytest.approx(0.5, abs=0.1)
    assert 4 <= sum(each.pauses for each in queue.keeper.records.values()) <= 24


def test_a_driver_that_dies_is_started_again_three_times(tmp_path: Path) -> None:
    queue = PlayedQueue.made(tmp_path, 8, RULES, start_seconds=100.0)
    queue.submit("a", 1000, 8)
    for attempt in range(1, 5):
        queue.play(3)
        queue.ray.die(f"a.{attempt}")
    queue.play(3)
    assert (queue.state("a"), queue.keeper.records["a"].reason) == ("failed", "exit code -9: killed")
    queue.keeper.release("a")
    queue.play(3)
    assert queue.keeper.records["a"].submission == "a.5"


def test_a_mistake_fails_at_once_and_a_stop_by_hand_is_a_hold(tmp_path: Path) -> None:
    queue = PlayedQueue.made(tmp_path, 8, RULES)
    queue.submit("a", 1000, 4)
    queue.submit("b", 1000, 4)
    queue.play(3)
    queue.ray.die("a.1", 2, "INFO\nerror: run.yaml:3: optim.lr: 'x' is not a number\n")
    queue.ray.stop("b.1")
    queue.play(40)
    assert queue.keeper.records["a"].reason == "exit code 2: error: run.yaml:3: optim.lr: 'x' is not a number"
    assert (queue.state("a"), queue.state("b")) == ("failed", "held")


def test_hold_release_move_and_cancel(tmp_path: Path) -> None:
    queue = PlayedQueue.made(tmp_path, 8, RULES)
    for name in ("a", "b", "c"):
        queue.submit(name, 1000, 8)
    queue.play(3)
    keeper = queue.keeper
    assert keeper.hold("a").state == "pausing"
    assert keeper.hold("c", "cancelled", "x").state == "cancelled"
    queue.play(40)
    assert (queue.state("a"), queue.state("b"), queue.state("c")) == ("held", "running", "cancelled")
    assert keeper.release("a").state == "waiting"
    assert keeper.move("a", 99).priority == 99
    queue.play(100)
    assert (queue.state("a"), queue.state("b")) == ("running", "paused")
    queue.play(1200)
    assert queue.state("a") == "succeeded"
    wrong = [
        (lambda: keeper.hold("a"), "a is succeeded"),
        (lambda: keeper.release("a"), "a has succeeded"),
        (lambda: keeper.hold("z"), "z: the queue has no such job"),
        (lambda: keeper.move("b", 101), "priority: 101 is not"),
        (lambda: keeper.move("b", "x"), "priority: 'x' is not"),
        (lambda: keeper.release("b", budget_usd=3), "nobody says what a node costs"),
        (lambda: keeper.release("b", budget_gpu_hours=-1), "budget_gpu_hours: -1 is not"),
        (lambda: keeper.owner("ann", {"weight": 0}), "weight: 0 is not a number > 0"),
        (lambda: keeper.owner("ann", {"share": 1}), "share: an owner has weight and quota"),
    ]
    for do, said in wrong:
        with pytest.raises(JobError) as error:
            do()
        assert said in str(error.value)


def test_a_budget_pauses_before_it_is_crossed_and_more_of_it_goes_on(tmp_path: Path) -> None:
    queue = PlayedQueue.made(tmp_path, 8, Rules(hourly=36.0, min_run=0))  # a cent a second
    queue.submit("a", 1000, 8, budget_usd=2.0)
    queue.play(400)
    a = queue.keeper.records["a"]
    assert a.state == "held"
    assert "its budget is used" in a.reason
    assert 1.5 < a.usd < 2.0 + 0.31  # the save is paid for too
    with pytest.raises(JobError, match="its budget is used"):
        queue.keeper.release("a")
    queue.keeper.release("a", budget_usd=50.0)
    queue.play(1200)
    assert queue.state("a") == "succeeded"


def test_nothing_starts_while_services_are_not_ready_or_the_cluster_stops(tmp_path: Path) -> None:
    gate, leaving = tmp_path / "gate", tmp_path / "leaving"
    gate.touch()
    queue = PlayedQueue.made(tmp_path / "q", 8, Rules(gate=gate, leaving=leaving))
    queue.submit("a", 1000, 8)
    queue.play(3)
    assert queue.keeper.records["a"].reason == "services that jobs need are not ready"
    gate.unlink()
    queue.play(3)
    leaving.touch()
    queue.ray.stop("a.1")
    queue.play(40)
    assert (queue.state("a"), queue.keeper.records["a"].reason) == ("paused", "the cluster is stopping")


def test_ray_may_be_silent_or_refuse(tmp_path: Path) -> None:
    queue = PlayedQueue.made(tmp_path, 8, RULES, refuses={"b"})
    queue.submit("a", 1000, 4)
    queue.submit("b", 1000, 4)
    queue.play(10)
    assert (queue.state("b"), queue.keeper.records["b"].reason) == ("failed", "did not start: Ray does not take it")
    queue.ray.down = True
    queue.play(10)
    assert queue.keeper.trouble == "Ray does not answer: Connection refused"
    queue.ray.down = False
    queue.play(2000)
    assert queue.state("a") == "succeeded"


def test_the_same_trace_gives_the_same_decisions(tmp_path: Path) -> None:
    def played(folder: Path) -> list[tuple[str, str, str]]:
        queue = PlayedQueue.made(folder, 16, RULES)
        for n in range(12):
            queue.submit(f"j{n}", 100 + 70 * n, [2, 4, 8, 16][n % 4], owner=["ann", "bob"][n % 2], priority=n * 37 % 101)
            queue.play(60, 5)
        queue.play(4000, 5)
        assert {each.state for each in queue.keeper.records.values()} == {"succeeded"}
        return [(each["job"], each["action"], each["reason"]) for each in queue.keeper.store.decisions(most=10000)]

    assert played(tmp_path / "1") == played(tmp_path / "2")


def test_a_forecast_is_what_then_happens(tmp_path: Path) -> None:
    queue = PlayedQueue.made(tmp_path, 8, Rules(min_run=60, hourly=8.0), start_seconds=0.0)
    queue.submit("low", 3600, 8, priority=10, seconds=3600)
    queue.submit("high", 1800, 8, priority=90, seconds=1800)
    queue.submit("third", 600, 4, priority=5, seconds=600)
    queue.submit("unknown", 600, 8, priority=1)
    queue.play(2)
    keeper = queue.keeper
    assert keeper.seen is not None
    jobs = forecast(keeper.cluster(keeper.seen), [*keeper.records.values()], keeper.owners, 0.0, 60, 8.0)["jobs"]
    assert jobs["high"]["end"] == pytest.approx(1800, abs=5)
    assert jobs["low"]["start"] == pytest.approx(1800, abs=5)
    assert jobs["low"]["usd"] == pytest.approx(8.0, abs=0.1)
    assert jobs["unknown"]["end"] is None
    queue.play(jobs["third"]["end"] + 20, 5)  # type: ignore[operator]
    assert [queue.state(name) for name in ("low", "high", "third")] == ["succeeded"] * 3


def test_a_file_of_a_newer_version_or_another_program_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path / "q")
    with pytest.raises(StoreError, match="another queue has it open"):
        Store(tmp_path / "q", lock_seconds=0.1)
    store.db.execute("UPDATE meta SET value = '99' WHERE key = 'schema'")
    store.close()
    with pytest.raises(StoreError, match="is of version 99, this queue reads up to 1"):
        Store(tmp_path / "q", lock_seconds=0.1)
    for text in (b"not a database at all, but longer than its header is" * 9, b""):
        (tmp_path / "r").mkdir(exist_ok=True)
        (tmp_path / "r/queue.sqlite").write_bytes(text)
        if text:
            with pytest.raises(StoreError, match="it is no file of the queue, or broken"):
                Store(tmp_path / "r", lock_seconds=0.1)
    Store(tmp_path / "r", lock_seconds=0.1).close()  # an empty one is a new one: it was killed as it made it
    assert (tmp_path / "q").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "q/queue.sqlite").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("jump", "most"), [(-1e8, 1.0), (3600.0, 3601.0), (1e9, 7 * 86400 + 1.0)])
def test_a_calendar_that_jumps_does_not_move_the_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float, most: float) -> None:
    """Between two heads at most a week counts as waiting, and nothing ever counts backwards."""
    store = Store(tmp_path)
    with store.written():
        pass
    before, real = float(store.meta("clock") or "x"), time.time
    monkeypatch.setattr(time, "time", lambda: real() + jump)
    assert 0 <= store.clock.now() - before < 1
    store.close()
    after = Store(tmp_path)
    assert 0 <= after.clock.now() - before <= most
    after.close()
