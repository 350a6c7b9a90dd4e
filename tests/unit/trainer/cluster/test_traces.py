"""traces/ of a run: which step gets which span, what a resumed run keeps, and clocks of other machines."""

from __future__ import annotations

import json
import random

import pytest

from trainer.cluster.spans import Batch
from trainer.cluster.traces import DRIFT, Clocks, Traces, measure
from trainer.page import lanes


def batch(*spans: tuple[str, float, float], lane: str = "policy-0") -> Batch:
    return Batch(lane, "rank", "10.0.0.2", "boot", [(name, begin, end, {}) for name, begin, end in spans])


def rows(folder, step):
    return [json.loads(line) for line in (folder / f"traces/step_{step}.jsonl").read_text().splitlines()]


def test_a_span_is_of_each_step_that_it_touches_by_the_drivers_clock(tmp_path):
    traces = Traces(tmp_path, 0)
    traces.begin(3, 100.0)
    traces.end(3, 102.0)
    traces.begin(4, 102.0)
    traces.add(
        batch(("early", 1098.0, 1099.5), ("learn", 1100.5, 1101.0), ("waiting", 1101.0, 1103.0), ("late", 1103.0, 1104.0)), 1000.0, 0.001
    )
    third, fourth = ([row for row in rows(tmp_path, step) if "spans" in row] for step in (3, 4))
    assert [span[:3] for span in third[0]["spans"]] == [["learn", 0.5, 1.0], ["waiting", 1.0, 3.0]]
    assert [span[:3] for span in fourth[0]["spans"]] == [["waiting", -1.0, 1.0], ["late", 1.0, 2.0]]
    assert third[0]["error"] == 0.001
    traces.close()
    traces.add(batch(("more", 100.1, 100.2), ("more", 102.1, 102.2)), 0.0, 0.0)
    assert len(rows(tmp_path, 3)) == 3 and len(rows(tmp_path, 4)) == 3, "a closed step gets no more"


def test_a_resumed_run_drops_the_steps_that_it_does_again(tmp_path):
    traces = Traces(tmp_path, 0)
    for step in (2, 4, 5):
        traces.begin(step, 1.0)
        traces.end(step, 2.0)
    traces.profile("policy-0", b"x", 0.0)
    assert lanes.steps(tmp_path) == [2, 4, 5] and (tmp_path / "traces/step_5.policy-0.1.torch.json.gz").exists()
    again = Traces(tmp_path, 4)
    assert lanes.steps(tmp_path) == [2, 4] and not [*tmp_path.glob("traces/step_5*")]
    again.begin(4, 7.0)
    assert len(rows(tmp_path, 4)) == 1, "begun anew"


def test_what_a_killed_run_has_recorded_can_be_read(tmp_path):
    traces = Traces(tmp_path, 0)
    traces.begin(3, 100.0)
    traces.add(batch(("forward", 100.0, 101.5)), 0.0, 0.0)
    with (tmp_path / "traces/step_3.jsonl").open("a") as file:
        file.write('{"lane": "policy-0", "ki')
    found = lanes.lanes(tmp_path, 3)
    assert (found["complete"], found["seconds"], [lane["name"] for lane in found["lanes"]]) == (False, 1.5, ["policy-0"])


def test_a_full_disk_ends_no_run(tmp_path):
    (tmp_path / "traces").write_text("in the way")
    traces = Traces(tmp_path, 0)
    traces.begin(3, 1.0)
    traces.add(batch(("forward", 1.0, 2.0)), 0.0, 0.0)
    traces.profile("policy-0", b"x", 0.0)
    traces.end(3, 2.0)


def test_pings_find_a_clock_that_is_off_within_what_they_say(monkeypatch):
    """A played network, whose way back is longer than the way there, or the other way round, by chance."""
    draw, now, ahead = random.Random(1), [50.0], 4321.0

    def ask() -> float:
        now[0] += draw.uniform(0.0001, 0.01)
        shown = now[0] + ahead
        now[0] += draw.uniform(0.0001, 0.01)
        return shown

    monkeypatch.setattr("trainer.cluster.traces.time.perf_counter", lambda: now[0])
    clocks = Clocks()
    measure(clocks, "policy-1", ask, times=20)
    offset, error = clocks.offset("policy-1", now[0])
    assert abs(offset - ahead) <= error < 0.005
    now[0] += 1000
    offset, later = clocks.offset("policy-1", now[0])
    assert later == pytest.approx(error + 1000 * DRIFT)
    clocks.ping("policy-1", now[0], now[0] + ahead + 0.011, now[0] + 0.02)
    assert clocks.offset("policy-1", now[0])[0] == pytest.approx(ahead + 0.001), "a worse ping counts once drift has outdone the better one"


def test_a_process_that_does_not_answer_is_asked_once():
    clocks, asked = Clocks(), []
    measure(clocks, "policy-1", lambda: asked.append(1))
    assert len(asked) == 1 and clocks.offset("policy-1", 0.0) == (0.0, float("inf"))
