"""Who is ended, by the beats that a driver sees; on a clock of the test's own."""

from __future__ import annotations

import pytest

from trainer.cluster import heartbeat
from trainer.cluster.heartbeat import EVERY, Beat, Watch

LIMIT = 10.0


@pytest.fixture
def beats(monkeypatch):
    """What `heartbeat.last` finds; `look` lets one interval pass before it looks."""
    found: dict[str, Beat] = {}
    clock = [100.0]
    monkeypatch.setattr(heartbeat, "last", found.get)
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: clock[0])
    return found, clock


def looks(beats, number: int, idle: dict[str, bool], stopped: tuple[str, ...] = (), passed: float = EVERY + 0.05) -> dict[str, str]:
    """So many looks at processes of which those that are not `stopped` beat; what the first look that ends somebody says."""
    found, clock = beats
    for name, rests in idle.items():
        found[name] = Beat(0, LIMIT, "", idle=rests)
    watch = Watch()
    for beat in range(1, number + 1):
        clock[0] += passed
        for name in idle.keys() - set(stopped):
            found[name] = Beat(beat, LIMIT, "", idle=idle[name])
        if ended := watch.look(idle):
            return ended
    return {}


@pytest.mark.parametrize("rests", [False, True])
def test_one_that_is_stopped_is_ended_alone_also_where_it_rested_last_and_others_wait_for_it(beats, rests):
    ended = looks(beats, 10, {"engine": rests, "policy": True}, stopped=("engine",))
    assert ended == {"engine": "gave no sign of life for 10 s (trainer.silence)"}


def test_an_engine_that_nobody_has_to_wait_for_is_ended_sooner(beats):
    found, clock = beats
    watch, ended = Watch(), {}
    for beat in range(10):
        found["engine"], found["policy"] = Beat(0, 100.0, "", silence=LIMIT), Beat(beat, 100.0, "")
        clock[0] += EVERY + 0.05
        ended = ended or watch.look(found)
    assert ended == {"engine": "gave no sign of life for 10 s (rollout.silence)"}


def test_all_that_rest_are_ended_together(beats):
    assert set(looks(beats, 10, {"engine": True, "policy": True})) == {"engine", "policy"}


def test_a_part_of_those_that_wait_for_one_another_is_no_deadlock(beats):
    found, clock = beats
    watch = Watch(deadlocks=False)
    for beat in range(40):
        clock[0] += EVERY
        found["policy"] = Beat(beat, LIMIT, "", idle=True)
        assert watch.look(["policy"]) == {}


def test_nobody_is_ended_where_one_works(beats):
    assert looks(beats, 40, {"engine": False, "policy": True}) == {}


def test_rest_adds_up_where_looks_come_faster_than_beats(beats):
    found, clock = beats
    watch, ended = Watch(), []
    for look in range(1, 13):
        clock[0] += EVERY / 2
        found["policy"] = Beat(look // 2, LIMIT, "", idle=True)
        ended.append(bool(watch.look(["policy"])))
    assert ended == [False] * 11 + [True], "the beat after ten seconds of it"


def test_what_each_does_is_shown_and_that_one_is_silent(beats):
    found, clock = beats
    watch, said = Watch(), []
    for number in range(8):
        clock[0] += EVERY
        found["policy"] = Beat(number, 60.0, "", doing="backward")
        found["rollout"] = Beat(min(number, 1), 60.0, "")
        said.append(watch.parts(["policy", "rollout", "no sign yet"]))
    assert said[2] == {"policy": "backward", "rollout": "waiting"}
    assert said[7] == {"policy": "backward", "rollout": "waiting; no sign of life for 12 s"}
