"""Which engines are asked for what, as engines come and go; Ray has no part in it."""

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from trainer.rollout import Sampling
from trainer.rollout.calls import Calls
from trainer.rollout.elastic import fitting


@pytest.fixture
def calls() -> Calls:
    found = Calls(cast(Any, SimpleNamespace(actors=["a"], awaited=False)), Sampling(1))
    found.actors = ["a"]
    assert found.find() == []
    return found


def test_an_engine_that_came_is_asked_once_it_has_the_weights(calls):
    calls.guests = {"elastic-0": "g"}
    assert calls.find() == []
    for name in range(3):
        calls.ask(name, [1], version=5)
    assert calls.seats["rollout-0"].asked == {0, 1, 2} and not calls.seats["elastic-0"].asked
    calls.seats["elastic-0"].version = 5
    calls.offer("elastic-0")
    for name in range(3, 6):
        calls.ask(name, [1], version=5)
    assert calls.seats["elastic-0"].asked == {3, 4, 5}
    assert calls.free(6) == "rollout-0", "newer weights are out"


def test_each_request_goes_to_the_engine_that_has_least_to_do_and_to_the_first_of_several(calls):
    """Whatever was asked, answered, lost and found before."""
    draw = random.Random(0)
    calls.actors = list(range(7))
    calls.find()
    for name in range(2000):
        least = min(calls.seats.values(), key=lambda seat: (len(seat.asked), seat.place))
        calls.ask(name, [1])
        assert name in least.asked
        for engine, seat in calls.seats.items():
            if seat.asked and draw.random() < 0.15:
                calls.open -= 1
                seat.asked.remove(draw.choice(sorted(seat.asked)))
                calls.offer(engine)
        if draw.random() < 0.02:
            calls.actors = [actor if draw.random() < 0.5 else object() for actor in calls.actors]
            calls.find()
        assert calls.open == sum(len(seat.asked) for seat in calls.seats.values())
        assert len(calls.least) <= 8 * 7 + 64


def test_an_engine_has_no_more_than_it_may_and_what_is_left_waits_for_one_that_comes(calls):
    calls.most = 2
    for name in range(2):
        calls.ask(name, [1])
    assert calls.free(0) is None
    calls.guests = {"elastic-0": "g"}
    calls.find()
    assert calls.free(0) is None, "it has no weights yet"
    calls.seats["elastic-0"].version = 0
    calls.offer("elastic-0")
    assert calls.free(0) == "elastic-0"
    calls.seats["rollout-0"].asked.remove(0)
    calls.offer("rollout-0")
    calls.ask(2, [1])
    assert calls.seats["elastic-0"].asked == {2}


def test_what_an_engine_had_that_left_is_lost_once(calls):
    calls.guests = {"elastic-0": "g"}
    calls.find()
    calls.seats["elastic-0"].version = 0
    calls.offer("elastic-0")
    for name in range(4):
        calls.ask(name, [1])
    calls.guests = {}
    had = calls.seats["elastic-0"].asked
    assert sorted(calls.find()) == sorted(had) and had and calls.find() == []
    assert calls.open == 4 - len(had) and list(calls.seats) == ["rollout-0"]


def test_a_process_in_place_of_another_loses_what_that_one_had(calls):
    calls.ask(7, [1])
    calls.actors = ["b"]
    assert calls.find() == [7]
    assert calls.seats["rollout-0"].actor == "b" and calls.open == 0


def test_a_node_gets_as_many_engines_as_find_room():
    assert fitting({"CPU": 1, "GPU": 1}, {"CPU": 32, "GPU": 8}) == 8
    assert fitting({"GPU": 0.5}, {"GPU": 0.9}) == 1
    assert fitting({"CPU": 1, "spot": 1}, {"CPU": 4}) == 0
    assert fitting({}, {"CPU": 4}) == 0
