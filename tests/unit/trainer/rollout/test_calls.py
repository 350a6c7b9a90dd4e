"""Which engines are asked for what, as engines come and go; Ray has no part in it."""

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.configs import settings

from trainer.data.loader import Loader
from trainer.environments.playing import Playing
from trainer.environments.policy import Request
from trainer.environments.runner import Asked
from trainer.episodes import Prompt, Turn
from trainer.online.continuous import Continuous
from trainer.online.elastic import fitting
from trainer.rollout import Sampling
from trainer.rollout.calls import Calls


@pytest.fixture
def calls() -> Calls:
    found = Calls(cast(Any, SimpleNamespace(actors=["a"], awaited=False, launcher=None)), Sampling(1))
    found.actors = {0: "a"}
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
    calls.actors = {number: object() for number in range(7)}
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
            calls.actors = {number: actor if draw.random() < 0.5 else object() for number, actor in calls.actors.items()}
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


@pytest.mark.parametrize(("version", "asked", "given"), [(4, 0, (6, 6)), (4, 11, (8, 1)), (3, 0, (0, 12)), (5, 0, (6, 6))])
def test_an_engine_that_is_behind_begins_as_many_as_can_be_learned_in_time(tmp_path, version, asked, given):
    """Four prompts a step, three steps of which are begun at most; so many go to the engine that comes and goes, and to the fixed one."""
    rollout = {"mode": "async", "elastic": True, "max_staleness": 2}
    config = settings(tmp_path, rollout=rollout, trainer={"prompts_per_step": 4, "steps": 100})
    engines = SimpleNamespace(actors=["a"], awaited=False, sampling=Sampling, launcher=None)
    workers: Any = SimpleNamespace(engines=engines, folder=tmp_path, model_path="", plan=())
    loader = Loader([Prompt(i, [1], {}) for i in range(100)], 4, 0)
    producer = Continuous(config, workers, loader, lambda *_: None)
    producer.groups.learned, calls = 5, producer.calls
    calls.actors, calls.guests, calls.most = {0: "a"}, {"elastic-0": "g"}, 12
    calls.find()
    calls.seats["elastic-0"].version = version
    calls.seats["rollout-0"].asked = set(range(1000, 1000 + asked))
    for name in calls.seats:
        calls.offer(name)
    producer._ask(most=24)
    came, stays = (calls.seats[name].asked for name in ("elastic-0", "rollout-0"))
    assert (len(came), len(stays) - asked) == given
    assert all(producer.groups.open[number].version == version for number in came)
    assert all(producer.groups.open[number].version == 5 for number in stays if number < 1000)


def test_a_turn_is_written_with_no_older_weights_than_its_episode_was_begun_with(calls):
    """The guest takes turns of older episodes before it has the newest weights, also after it was looked at for others."""
    playing = Playing(cast(Any, SimpleNamespace(processes=[None])), samples=1)
    for number, version in ((0, 5), (1, 4), (2, 5), (3, 4)):
        playing.begin(number, Prompt(number, [number], {}), 0, version)
    calls.guests = {"elastic-0": "g"}
    calls.find()
    calls.seats["elastic-0"].version = 4
    calls.offer("elastic-0")

    def ask(*numbers: int) -> dict[str, set[int]]:
        playing.wanted.extend((0, Asked(((number, 0), 0), Request([number], 1))) for number in numbers)
        names: dict[int, int] = {}
        for name, asked, version in playing.turns(calls.free):
            names[name] = asked.key[0]
            calls.ask(name, asked.request.token_ids, version)
        return {engine: {names[name] for name in seat.asked & names.keys()} for engine, seat in calls.seats.items()}

    assert ask(0, 1, 2, 3) == {"rollout-0": {1, 0, 2}, "elastic-0": {3}}
    assert ask(0, 0) == {"rollout-0": {0}, "elastic-0": set()}
    calls.seats["elastic-0"].asked.clear()
    calls.due.clear()  # of what Ray would be told
    calls.collect(0)
    assert ask(1) == {"rollout-0": set(), "elastic-0": {1}}


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
    calls.actors = {0: "b"}
    assert calls.find() == [7]
    assert calls.seats["rollout-0"].actor == "b" and calls.open == 0


def test_a_node_gets_as_many_engines_as_find_room():
    assert fitting({"CPU": 1, "GPU": 1}, {"CPU": 32, "GPU": 8}) == 8
    assert fitting({"GPU": 0.5}, {"GPU": 0.9}) == 1
    assert fitting({"CPU": 1, "spot": 1}, {"CPU": 4}) == 0
    assert fitting({}, {"CPU": 4}) == 0


def test_what_is_answered_is_not_open_any_more(calls):
    """Calls that end at once: the first answers every request that it is given, the one behind it none."""
    called: list[Any] = []  # what each returned; a reference is its number
    calls.launcher = SimpleNamespace(done=lambda refs, *_: (refs, []), get=called.__getitem__)

    def work(new: list[Any], *_: Any) -> int:
        called.append(({name: ([Turn([1, 2], [0.0, 0.0], "stop")], ["x"]) for name, *_ in new}, 0.5, 3))
        return len(called) - 1

    calls.actors = {0: SimpleNamespace(work=SimpleNamespace(remote=work))}
    calls.find()
    calls.engines.awaited = True
    for name in range(3):
        calls.ask(name, [1])
    assert calls.open == 3
    answers, lost = calls.collect(0)
    assert (sorted(answers), lost, calls.open) == ([0, 1, 2], [], 0)
    assert (calls.seats["rollout-0"].asked, calls.seats["rollout-0"].tokens) == (set(), 6)
