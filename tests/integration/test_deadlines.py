"""What a run says of a process that does not answer, or dies, on a real Ray."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

ray = pytest.importorskip("ray")

from support.ray_actors import local_ray  # noqa: E402

from trainer.cluster import heartbeat, on_ray  # noqa: E402
from trainer.errors import RunError  # noqa: E402

pytestmark = pytest.mark.wide


@pytest.fixture(scope="module")
def ranks() -> Iterator[list]:
    class Rank:  # in here, so that Ray sends it by value
        def answer(self) -> str:
            return "here"

        def hang(self) -> None:
            time.sleep(3600)

        def die(self) -> None:
            os._exit(1)

        def begin(self, silence: float, ready: bool = False) -> None:
            heartbeat.begin(silence)
            if ready:
                heartbeat.ready.set()

        def compute(self, seconds: float) -> str:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                pass
            return "done"

        def child(self, seconds: float) -> None:
            import subprocess
            import sys

            subprocess.run([sys.executable, "-c", "while True: pass"], timeout=seconds, check=False)

        def pid(self) -> int:
            return os.getpid()

    with local_ray(2, logging_level="ERROR"):
        yield [ray.remote(Rank).options(name=f"policy-{rank}", num_cpus=0).remote() for rank in range(8)]


def test_the_rank_that_hangs_is_named_with_its_node_and_those_that_answered_are_not(ranks: list) -> None:
    pid = ray.get(ranks[1].pid.remote())
    ray.get([rank.answer.remote() for rank in ranks])
    refs = [ranks[0].answer.remote(), ranks[1].hang.remote()]
    ray.get(refs[0])
    with pytest.raises(RunError) as late:
        on_ray.wait(refs, 0.5, "policy.update (trainer.timeout)")
    node = ray.util.get_node_ip_address()
    assert str(late.value).startswith(
        f"policy.update (trainer.timeout) did not end within 0.5 s, waiting for policy-1 (node {node}, pid {pid}); log: worker-*-PID.out"
    )
    assert "policy-0" not in str(late.value)


def test_the_rank_that_died_is_named(ranks: list) -> None:
    pid = ray.get(ranks[2].pid.remote())
    with pytest.raises(RunError, match=rf"^policy\.update: policy-2 \(node \S+, pid {pid}\) died: "):
        on_ray.wait([ranks[2].die.remote()], 60, "policy.update")


def test_a_process_that_is_stopped_is_named_with_its_state_and_place_and_ended(ranks: list) -> None:
    pid = ray.get(ranks[3].pid.remote())
    ranks[3].begin.remote(1.0)
    ref = ranks[3].hang.remote()
    assert until(lambda: (heartbeat.last(ref.task_id().actor_id().hex()) or heartbeat.Beat(0, 0, "")).at.endswith(" hang"))
    os.kill(pid, signal.SIGSTOP)
    silent = (
        rf"policy-3 \(node \S+, pid {pid}\) gave no sign of life for \d+ s \(trainer.silence\), its state is T \(stopped\), it was last at "
    )
    with pytest.raises(RunError, match=rf"^policy.update: {silent}test_deadlines.py:\d+ hang"):
        on_ray.wait([ranks[0].answer.remote(), ref], 120, "policy.update")
    assert until(lambda: not os.path.exists(f"/proc/{pid}"))  # noqa: PTH110


def test_processes_that_only_wait_for_one_another_are_ended_with_their_places_and_stacks(ranks: list, capfd) -> None:
    for rank in ranks[5:7]:
        rank.begin.remote(heartbeat.EVERY + 2, ready=True)
    first, second = (ray.get(rank.pid.remote()) for rank in ranks[5:7])
    with pytest.raises(RunError) as ended:
        on_ray.wait([ranks[5].hang.remote(), ranks[6].hang.remote(), ranks[0].answer.remote()], 120, "policy.update")
    for name, pid in (("policy-5", first), ("policy-6", second)):
        stuck = rf"{name} \(node \S+, pid {pid}\) did nothing for \d+ s \(trainer.silence\), its state is S \(sleeping\), "
        assert re.search(stuck + r"it was last at test_deadlines.py:\d+ hang; log: ", str(ended.value))
        assert until(lambda pid=pid: not os.path.exists(f"/proc/{pid}"))  # noqa: PTH110
    assert 'test_deadlines.py", line' in capfd.readouterr().err


@pytest.mark.slow
def test_one_that_waits_for_another_which_works_is_left_alone(ranks: list) -> None:
    """In a child, as some engines do their work."""
    ranks[0].begin.remote(heartbeat.EVERY + 2, ready=True)
    ranks[7].begin.remote(heartbeat.EVERY + 2, ready=True)
    with pytest.raises(RunError, match=re.escape("did not end within 12 s, waiting for policy-0 (")) as late:
        on_ray.wait([ranks[0].hang.remote(), ranks[7].child.remote(60)], 12, "policy.update")
    assert "policy-7" in str(late.value)


@pytest.mark.slow
def test_who_waits_beside_the_main_thread_ends_none_for_doing_nothing(ranks: list) -> None:
    """As the writing of checkpoints, which does not see what else a rank waits for."""
    ranks[0].begin.remote(heartbeat.EVERY + 2, ready=True)
    ranks[0].hang.remote()
    with ThreadPoolExecutor(1) as pool, pytest.raises(RunError, match=re.escape("did not end within 10 s, waiting for policy-0 (")):
        pool.submit(on_ray.wait, ranks[0].answer.remote(), 10, "checkpoint").result()


@pytest.mark.slow
def test_a_process_that_computes_or_waits_for_long_is_not_taken_for_a_silent_one(ranks: list) -> None:
    ranks[4].begin.remote(heartbeat.EVERY + 2)
    assert on_ray.wait(ranks[4].compute.remote(10), 60, "policy.update") == "done"
    with pytest.raises(RunError, match=re.escape("did not end within 8 s, waiting for policy-4 (")) as late:
        on_ray.wait(ranks[4].hang.remote(), 8, "policy.update")
    assert re.search(r"pid \d+\) at test_deadlines.py:\d+ hang", str(late.value))


def until(happened: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 120
    while not happened() and time.monotonic() < deadline:
        time.sleep(0.05)
    return happened()
