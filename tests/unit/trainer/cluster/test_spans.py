"""Spans: whose they are, what is between calls, and what costs nothing where nothing is recorded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from trainer.cluster import spans
from trainer.cluster.spans import LANES, Batch, Recorded, merged, new_lane, on_lane, register, span


@pytest.fixture(autouse=True)
def lanes() -> Iterator[None]:
    yield
    LANES.clear()


class Engine(Recorded):
    KIND, WAITS = "engine", "idle"

    def work(self, other: Engine | None = None) -> str:
        with span("decode", running=3):
            return other.work() if other else "done"

    def call(self, method: str) -> object:
        return getattr(self, method)()

    def beat(self) -> None:
        """Beside the work."""


def names(lane: str) -> list[str]:
    return [name for name, *_ in LANES[lane].spans]


def test_calls_are_spans_and_so_is_what_is_between_them():
    engine = Engine()
    engine.work()
    engine.record(True, "rollout-0", [], None)
    engine.work()
    engine.beat()
    engine.call("work")
    assert names("rollout-0") == ["idle", "decode", "sample", "idle", "decode", "sample", "sample"], "a call within another is a part"
    found = [*LANES["rollout-0"].spans]
    outer = [each for each in found if each[0] in ("idle", "sample")]
    assert outer[0][2] <= outer[1][1] and outer[1][2] == outer[2][1]
    assert found[1][3] == {"running": 3}
    engine.record(False, "rollout-0", [], None)
    assert names("rollout-0")[-1] == "idle"
    taken = spans.take("10.0.0.2")
    assert [(batch.lane, batch.kind, batch.node, len(batch.spans)) for batch in taken] == [("rollout-0", "engine", "10.0.0.2", 8)]
    engine.work()
    assert not spans.take(), "it records no longer"


def test_objects_of_one_process_have_lanes_of_their_own():
    driver, first, second = new_lane("driver", "driver"), Engine(), Engine()
    driver.switch(True)
    for number, engine in enumerate((first, second)):
        engine.record(True, f"rollout-{number}", [], None)
    with on_lane(driver), span("learn"):
        first.work(second)
    assert names("driver") == ["learn"]
    assert names("rollout-0") == ["idle", "decode", "sample"] and names("rollout-1") == ["idle", "decode", "sample"]


def test_an_error_ends_the_spans_around_it():
    engine = Engine()
    engine.record(True, "rollout-0", [], None)
    with pytest.raises(AttributeError):
        engine.call("nothing")
    assert names("rollout-0") == ["idle", "nothing"]
    engine.work()
    assert names("rollout-0")[2:] == ["idle", "decode", "sample"]


def test_nothing_is_recorded_off_a_lane_on_another_thread_or_on_one_that_is_off():
    def learn() -> None:
        with span("learn"):
            pass

    lane = new_lane("driver", "driver")
    learn()
    with on_lane(lane):
        learn()
        spans.lap("learn")
        lane.switch(True)
        thread = threading.Thread(target=learn)
        thread.start()
        thread.join()
        assert spans.recording()
    assert not lane.spans and not spans.recording()
    with spans.aside("rewards", "score"):
        pass


def test_laps_leave_no_gap():
    lane = new_lane("driver", "driver")
    lane.switch(True)
    with on_lane(lane):
        spans.lap("generate")
        spans.lap("learn")
    (_, begin, middle, _), (_, again, end, _) = lane.spans
    assert begin <= middle == again <= end


def test_a_thousand_steps_of_decoding_are_one_span_until_something_changes():
    steps = [("decode", i * 0.01, i * 0.01 + 0.01, {"running": 4 if i < 600 else 3, "count": 1}) for i in range(1000)]
    assert [(name, round(begin, 3), round(end, 3), numbers) for name, begin, end, numbers in merged(steps)] == [
        ("decode", 0.0, 6.0, {"running": 4, "count": 600}),
        ("decode", 6.0, 10.0, {"running": 3, "count": 400}),
    ]
    apart = [("decode", 0.0, 0.01, {"count": 1}), ("decode", 0.02, 0.03, {"count": 1})]
    other = [("forward", 0.0, 0.01, {}), ("forward", 0.01, 0.02, {})]
    assert merged(apart) == apart and merged(other) == other


def test_a_lane_that_nobody_takes_from_forgets_its_oldest_spans(monkeypatch):
    monkeypatch.setattr(spans, "MOST", 3)
    lane = new_lane("driver", "driver")
    for i in range(5):
        lane.add(str(i), 0.0, 1.0, {})
    assert spans.take() == [Batch("driver", "driver", "", spans.boot(), [(str(i), 0.0, 1.0, {}) for i in (2, 3, 4)])]


def test_a_launcher_keeps_what_has_a_lane_under_its_name_or_the_next_free_one():
    found: dict[str, object] = {}
    for kind, name in ((Engine, "rollout-0"), (Engine, None), (Engine, None), (dict, "other")):
        register(found, kind, name, object())
    assert [*found] == ["rollout-0", "engine-0", "engine-1"]


def test_what_a_process_does_is_known_whether_it_records_or_not():
    seen: list[str] = []

    class Rank(Recorded):
        def optimizer_step(self) -> None:
            seen.append(spans.doing())
            with suppress(ValueError), spans.span("backward"):
                seen.append(spans.doing())
                raise ValueError
            seen.append(spans.doing())

    rank = Rank()
    for on in (False, True):
        rank.record(on, "policy-0", [], None)
        rank.optimizer_step()
    assert seen == ["learn", "backward", "learn"] * 2 and spans.doing() == ""
