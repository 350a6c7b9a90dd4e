"""The timeline as it is read: lanes in order, spans that nest, damaged and missing files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from trainer.page import lanes
from trainer.page.lanes import NoTimeline, nested


def traced(folder: Path, step: int, *rows: dict[str, Any], seconds: float = 2.0, began: float = 1000.0) -> Path:
    (folder / "traces").mkdir(exist_ok=True)
    lines = [{"step": step, "time": began}, *rows, {"end": seconds}]
    (folder / f"traces/step_{step}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def lane(name: str, kind: str, *spans: list[Any]) -> dict[str, Any]:
    return {"lane": name, "kind": kind, "node": "10.0.0.2", "error": 0.0, "spans": [[*span, {}][:4] for span in spans]}


def test_lanes_are_in_the_order_of_their_kinds_and_numbers_and_cut_to_the_step(tmp_path):
    kinds = {"rollout-10": "engine", "rollout-9": "engine", "policy-1": "rank", "driver": "driver", "new": "something", "rewards": "reward"}
    traced(tmp_path, 20, *(lane(name, kind, ["doze", -1.0, 5.0]) for name, kind in kinds.items()))
    found = lanes.lanes(tmp_path, 20)
    assert [each["name"] for each in found["lanes"]] == ["driver", "policy-1", "rollout-9", "rollout-10", "rewards", "new"]
    assert all(each["spans"] == [["doze", 0.0, 2.0, {}]] for each in found["lanes"])
    assert (found["step"], found["seconds"], found["complete"], found["words"]) == (20, 2.0, True, [])


def test_the_lines_of_a_lane_are_one_and_what_is_outside_the_step_is_not_there(tmp_path):
    traced(tmp_path, 3, lane("policy-0", "rank", ["learn", 0.5, 1.0]), lane("policy-0", "rank", ["waiting", 0.0, 0.5], ["late", 2.0, 3.0]))
    [found] = lanes.lanes(tmp_path, 3)["lanes"]
    assert [span[0] for span in found["spans"]] == ["waiting", "learn"]
    assert lanes.accounted(found, 2.0) == 0.5


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([("a", 0, 1), ("b", 1, 2)], [("a", 0, 1), ("b", 1, 2)]),
        ([("in", 0.2, 0.4), ("out", 0, 1)], [("out", 0, 1), ("in", 0.2, 0.4)]),
        ([("a", 0, 1), ("b", 0.9, 2)], [("a", 0, 1), ("b", 1, 2)]),  # by the few microseconds between two looks at the clock
        ([("out", 0, 1), ("in", 0.5, 1.2), ("next", 1, 3)], [("out", 0, 1), ("in", 1, 1.2), ("next", 1.2, 3)]),
        ([("whole", -1, 9), ("in", 3, 3.5)], [("whole", 0, 3.2), ("in", 3, 3.2)]),
        ([("never", 5, 6)], []),
    ],
)
def test_spans_nest(spans, expected):
    found = nested([[*span, {}] for span in spans], 3.2)
    assert [(name, begin, end) for name, begin, end, _ in found] == expected


def test_what_there_is_not_is_named_with_what_there_is(tmp_path):
    with pytest.raises(NoTimeline, match=r"no timeline of step 3; it has none: log\.trace\.steps says which steps are traced"):
        lanes.lanes(tmp_path, 3)
    traced(traced(tmp_path, 20), 21)
    with pytest.raises(NoTimeline, match="no timeline of step 3; it has those of 20, 21"):
        lanes.lanes(tmp_path, 3)
    with pytest.raises(NoTimeline, match="no step was traced"):
        lanes.perfetto(tmp_path, [])


@pytest.mark.parametrize("line", ["{", "7", "\x00"])
def test_a_damaged_line_is_named_and_one_that_was_cut_off_is_none(tmp_path, line):
    file = traced(tmp_path, 3, lane("driver", "driver", ["learn", 0.0, 2.0])) / "traces/step_3.jsonl"
    whole = file.read_text()
    file.write_text(whole + line)
    assert lanes.lanes(tmp_path, 3)["lanes"]
    file.write_text(f"{line}\n{whole}")
    with pytest.raises(NoTimeline, match=r"step_3\.jsonl:1: not a line of a timeline"):
        lanes.lanes(tmp_path, 3)


def events(content: bytes) -> list[dict[str, Any]]:
    return json.loads(gzip.decompress(content))["traceEvents"]


def test_perfetto_gets_a_process_for_each_lane_on_one_clock(tmp_path):
    driver, engine = lane("driver", "driver", ["learn", 0.0, 2.0]), lane("rollout-0", "engine", ["decode", 0.5, 1.0])
    engine["spans"][0][3] = {"running": 4, "waiting": 2, "count": 9}
    traced(tmp_path, 20, driver, engine, began=1000.0)
    traced(tmp_path, 21, driver, engine, began=1002.5)
    found = events(lanes.perfetto(tmp_path, [20, 21]))
    assert {event["args"]["name"]: event["pid"] for event in found if event["name"] == "process_name"} == {
        "driver (10.0.0.2)": 1,
        "rollout-0 (10.0.0.2)": 2,
    }
    spans = [(event["pid"], event["name"], event["ts"], event["dur"]) for event in found if event["ph"] == "X"]
    first, second = 0.0, 2.5e6
    assert spans == [
        *((1, "step 20", first, 2e6), (1, "learn", first, 2e6), (2, "decode", first + 5e5, 5e5)),
        *((1, "step 21", second, 2e6), (1, "learn", second, 2e6), (2, "decode", second + 5e5, 5e5)),
    ]
    counted = [event["args"] for event in found if event["ph"] == "C"]
    assert counted == [{"sequences at work": 4, "requests waiting": 2}] * 2
    required = {"X": {"name", "ts", "dur", "pid", "tid"}, "C": {"name", "ts", "pid", "args"}, "M": {"name", "pid", "args"}}
    assert all(event.keys() >= required[event["ph"]] and isinstance(event["pid"], int) for event in found)
    assert all(event["dur"] > 0 for event in found if event["ph"] == "X")


def test_what_torch_saw_lies_under_the_lane_at_the_time_of_the_step(tmp_path):
    seen = [
        {"ph": "M", "name": "thread_name", "pid": 77, "tid": 5, "args": {"name": "stream 7"}},
        {"ph": "X", "name": "flotilla clock 500.0", "pid": 77, "tid": 4, "ts": 9_000_000.0, "dur": 1},
        {"ph": "X", "name": "gemm", "pid": 77, "tid": 5, "ts": 9_250_000.0, "dur": 100},  # at 500.25
        {"ph": "s", "name": "ac2g", "id": 3, "pid": 77, "tid": 5, "ts": 9_250_000.0},
        {"ph": "X", "name": "after", "pid": 77, "tid": 5, "ts": 99_000_000.0, "dur": 100},
    ]
    traced(
        tmp_path,
        20,
        lane("driver", "driver", ["learn", 0.0, 2.0]),
        lane("policy-0", "rank", ["learn", 0.0, 2.0]),
        {"torch": "profile.json.gz", "lane": "policy-0", "begin": 500.1},
        {"torch": "gone.json.gz", "lane": "policy-0", "begin": 500.1},
        {"torch": "damaged.json.gz", "lane": "policy-0", "begin": 500.1},
    )
    (tmp_path / "traces/profile.json.gz").write_bytes(gzip.compress(json.dumps({"traceEvents": seen}).encode()))
    (tmp_path / "traces/damaged.json.gz").write_bytes(b"nothing")
    found = [event for event in events(lanes.perfetto(tmp_path, [20])) if event["pid"] == 2 and event["tid"] > 0]
    assert found[0]["args"] == {"name": "torch: stream 7"}
    assert [(event["name"], event["ts"]) for event in found[1:]] == [("gemm", 150_000.0), ("ac2g", 150_000.0)]
    assert found[2]["id"] == "2-3"
