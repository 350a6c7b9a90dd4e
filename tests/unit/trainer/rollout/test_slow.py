"""Which rollout engines count as slow, and what becomes of their requests; time and seats are played."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.configs import settings

from trainer.episodes import Episode, Prompt, Turn
from trainer.online.continuous import Continuous
from trainer.online.groups import Group, Groups
from trainer.rollout import Sampling, slow
from trainer.rollout.calls import Calls
from trainer.rollout.slow import Slow


class Play:
    """Three engines, each asked for two prompts, that work second by second."""

    def __init__(self, now: list[float]) -> None:
        self.now = now
        self.engines = SimpleNamespace(
            actors=["a", "b", "c"], awaited=False, launcher=SimpleNamespace(end_late=lambda ref, why: f"who {why}")
        )
        self.calls = Calls(cast(Any, self.engines), Sampling(1))
        self.calls.actors = dict(enumerate(self.engines.actors))
        self.calls.find()
        for name in range(6):
            self.calls.ask(name, [1])
        self.slow = Slow(10, self.calls)

    def work(self, seconds: int, **steps: float) -> list[tuple[str, list[int]]]:
        """So many steps a second; 0: its calls do not return."""
        found = []
        for _ in range(seconds):
            self.now[0] += 1.0
            for letter, each in zip("abc", ("rollout-0", "rollout-1", "rollout-2"), strict=True):
                if seat := self.calls.seats.get(each):
                    seat.calls = [SimpleNamespace(task_id=lambda: SimpleNamespace(actor_id=lambda: b"\0"))]
                    if (count := steps[letter]) > 0:
                        seat.worked, seat.steps, seat.silent = seat.worked + 1, seat.steps + int(count), 0.0
            found += self.slow.look()
        return found


@pytest.fixture
def play(monkeypatch) -> Play:
    now = [0.0]
    monkeypatch.setattr(slow.time, "monotonic", lambda: now[0])
    return Play(now)


def test_engines_that_work_alike_are_not_slow_however_long_an_answer_takes(play):
    assert play.work(600, a=100, b=50, c=20) == []


@pytest.mark.parametrize(("steps", "named"), [(3, ["rollout-1 is slow"]), (0, [])], ids=["works", "does not return"])
def test_engines_that_are_awaited_most_of_the_time_are_looked_at_in_between(play, steps, named):
    """What does not return in a weight sync may wait for another engine there."""
    found = []
    for _ in range(40):
        play.engines.awaited = True
        assert play.work(1, a=100, b=steps, c=100) == []
        play.engines.awaited = False
        play.now[0] += 0.05
        found += play.slow.look()
    assert [what.partition(":")[0] for what, _ in found] == named


def test_a_slow_engine_is_named_its_requests_are_asked_again_and_it_gets_no_more_until_it_has_answered(play):
    [(what, again)] = play.work(40, a=100, b=3, c=100)
    assert what.startswith("rollout-1 is slow: 0.345 s per step, other rollout engines take 0.01 s (rollout.slow=10); the 2 prompts")
    assert again == [1, 4]
    for name in range(10, 20):
        play.calls.ask(name, [1])
    assert play.calls.seats["rollout-1"].asked == {1, 4}
    assert play.work(300, a=100, b=3, c=100) == [], "it is slow, and answers its calls"
    play.calls.open -= 2
    play.calls.seats["rollout-1"].asked.clear()
    play.work(1, a=100, b=100, c=100)
    play.calls.ask(20, [1])
    assert play.calls.seats["rollout-1"].asked == {20}


def test_an_engine_whose_calls_do_not_return_is_slow_and_then_ended(play):
    play.work(20, a=100, b=100, c=100)
    [(first, again), (second, none)] = play.work(65, a=100, b=100, c=0)
    assert first.startswith("rollout-2 is slow: ") and again == [2, 5]
    assert second == "rollout-2 is ended: who did not answer for 61 s (rollout.slow)" and none == []
    assert "rollout.slow" in str(play.calls.error)


def test_while_engines_take_weights_or_evaluate_no_time_passes(play):
    play.work(20, a=100, b=100, c=100)
    play.engines.awaited = True
    assert play.work(600, a=0, b=0, c=0) == []
    play.engines.awaited = False
    assert play.work(5, a=100, b=0, c=100) == []


def test_an_engine_is_not_slow_without_another_to_compare_it_with(play):
    play.calls.actors = {0: "a"}
    play.calls.find()
    assert play.work(300, a=0, b=0, c=0) == []


def test_of_two_answers_the_first_counts_and_what_a_second_engine_owes_is_not_lost(play, tmp_path):
    producer, groups = Continuous.__new__(Continuous), Groups(settings(tmp_path, rollout={"mode": "async"}), cast(Any, None))
    producer.calls, producer.groups, producer.playing = play.calls, groups, None
    group = groups.open[1] = Group(1, Prompt(0, [1], {}), version=3)
    groups.learned = 5
    groups.second([1, 2])
    assert groups.next() is group and group.version == 3, "its first engine may still answer, with tokens that old"
    play.calls.seats["rollout-2"].asked.add(1)
    producer._lose([1])
    assert not groups.again, "of the other engine"
    producer._complete(1, [Turn([1, 2], [-1.0, -1.0])], [""])
    producer._complete(1, [Turn([1, 2, 3], [-1.0] * 3)], [""])
    assert groups.sampled == [group] and isinstance(group.episodes[0], Episode) and len(group.episodes[0].response_ids) == 2
    assert groups.counts["thrown_tokens"] == 3
    for seat in play.calls.seats.values():
        seat.asked.discard(1)
    producer._lose([1])
    assert not groups.again, "it is answered"
