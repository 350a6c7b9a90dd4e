"""The queue's rounds, on a cluster that is played."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from cluster_tasks.node.job_queue.forecast import forecast
from cluster_tasks.node.job_queue.jobs import JobError
from cluster_tasks.node.job_queue.keeper import Rules
from cluster_tasks.node.job_queue.store import Store, StoreError
from lab.played_queue import PlayedQueue

RULES = Rules("onprem", min_run=60)


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
