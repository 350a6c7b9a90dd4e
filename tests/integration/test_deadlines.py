"""What a run says of a process that does not answer, or dies, on a real Ray."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

ray = pytest.importorskip("ray")

from trainer import actors  # noqa: E402


@pytest.fixture(scope="module")
def ranks() -> Iterator[list]:
    class Rank:  # in here, so that Ray sends it by value
        def answer(self) -> str:
            return "here"

        def hang(self) -> None:
            time.sleep(3600)

        def die(self) -> None:
            os._exit(1)

        def pid(self) -> int:
            return os.getpid()

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield [ray.remote(Rank).options(name=f"policy-{rank}", num_cpus=0).remote() for rank in range(3)]
    ray.shutdown()


def test_the_rank_that_hangs_is_named_with_its_node_and_those_that_answered_are_not(ranks: list) -> None:
    pid = ray.get(ranks[1].pid.remote())
    ray.get([rank.answer.remote() for rank in ranks])
    refs = [ranks[0].answer.remote(), ranks[1].hang.remote()]
    ray.get(refs[0])
    with pytest.raises(actors.RunError) as late:
        actors.wait(refs, 0.5, "policy.update (trainer.timeout)")
    node = ray.util.get_node_ip_address()
    assert str(late.value).startswith(
        f"policy.update (trainer.timeout) did not end within 0.5 s, waiting for policy-1 (node {node}, pid {pid}); log: worker-*-PID.out"
    )
    assert "policy-0" not in str(late.value)


def test_the_rank_that_died_is_named(ranks: list) -> None:
    pid = ray.get(ranks[2].pid.remote())
    with pytest.raises(actors.RunError, match=rf"^policy\.update: policy-2 \(node \S+, pid {pid}\) died: "):
        actors.wait([ranks[2].die.remote()], 60, "policy.update")
