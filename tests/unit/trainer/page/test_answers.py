"""What the page of runs tells of runs: states, curves, what moved, which prompts teach nothing; and what is refused."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from support import page_runs

from trainer.page import episodes, reasons, runs
from trainer.page.answers import Answers
from trainer.page.metrics import Metrics, tail


def row_of(root: Path, name: str) -> dict[str, Any]:
    return next(row for row in Answers([root]).ask("runs", {})["runs"] if row["name"] == name)


@pytest.mark.parametrize(
    ("alive", "files", "state", "word"),
    [
        (None, {}, "unknown", ""),
        (None, {"model": None}, "finished", ""),
        ({"time": 0, "host": "gpu1"}, {}, "killed", "last on gpu1"),
        ({"time": 1e12, "doing": "step 4: learning"}, {}, "running", "step 4: learning"),
        ({"time": 0, "ended": True}, {"steps": 30}, "finished", ""),
        ({"time": 0, "ended": True}, {"steps": 99}, "stopped", "the same command resumes"),
        ({"time": 0, "ended": True}, {"steps": 99, "fault": None}, "failed", "CUDA out of memory"),
        ({"time": 0, "ended": True}, {"steps": 99, "fault": 3}, "stopped", "CUDA out of memory"),
    ],
)
def test_the_state_of_a_run(tmp_path, alive, files, state, word):
    folder = page_runs.run(tmp_path, "a", steps=30)
    if alive:
        (folder / "alive.json").write_text(json.dumps(alive))
    if "model" in files:
        (folder / "model").mkdir()
    if files.get("steps") == 99:
        (folder / "run.yaml").write_text("trainer: {steps: 99}")
    if "fault" in files:
        (folder / "faults.jsonl").write_text(json.dumps({"time": "9999", "step": files["fault"], "what": "CUDA out of memory"}) + "\n")
    row = row_of(tmp_path, "a")
    assert row["state"] == state and word in row["word"]


def test_the_table_has_owner_cost_and_step_of_each_run(tmp_path):
    page_runs.run(tmp_path, "a", steps=12, cost=3.0)
    row = row_of(tmp_path, "a")
    assert (row["owner"], row["cost_usd"], row["step"], row["steps"], row["algorithm"]) == ("alice", 3.0, 12, 12, "grpo")


def test_why_reward_fell_is_named_by_what_moved_there(tmp_path):
    folder = page_runs.run(tmp_path, "a", fall=40)
    (folder / "faults.jsonl").write_text(json.dumps({"time": "T", "step": 41, "what": "rollout-1 died"}) + "\n")
    run = Answers([tmp_path]).ask("run", {"name": "a"})
    assert [jump["step"] for jump in run["jumps"]] == [40] and run["jumps"][0]["by"] < -0.2
    moved = Answers([tmp_path]).ask("moved", {"name": "a", "step": "40"})
    assert [row["key"] for row in moved["moved"]] == ["truncated", "reward"]
    assert "rollout.max_new_tokens" in moved["moved"][0]["meaning"] and [event["text"] for event in moved["events"]] == ["rollout-1 died"]


def test_a_run_that_only_learns_has_no_jump(tmp_path):
    page_runs.run(tmp_path, "a")
    answers = Answers([tmp_path])
    assert answers.ask("run", {"name": "a"})["jumps"] == []
    assert answers.ask("moved", {"name": "a", "step": "30"})["moved"] == []


def test_prompts_that_teach_nothing_come_first(tmp_path):
    page_runs.run(tmp_path, "a")
    told = Answers([tmp_path]).ask("prompts", {"name": "a"})
    assert [row["prompt"] for row in told["rows"][:2]] == [3, 9] and told["never"] == 2 and told["total"] == 20
    assert all(row["signal"] == 0 and row["reward"] == 0 for row in told["rows"][:2]) and told["rows"][2]["signal"] > 0
    hardest = Answers([tmp_path]).ask("prompts", {"name": "a", "order": "easiest"})
    assert hardest["rows"][0]["reward"] == max(row["reward"] for row in hardest["rows"])


def test_what_changed_since_the_run_before(tmp_path):
    page_runs.run(tmp_path, "a", lr=1e-6, begin=0)
    page_runs.run(tmp_path, "b", lr=3e-6, begin=100)
    run = Answers([tmp_path]).ask("run", {"name": "b"})
    assert run["before"] == "a" and run["changed"] == [{"name": "optim.lr", "values": ["1e-06", "3e-06"]}]
    assert Answers([tmp_path]).ask("run", {"name": "a"})["before"] is None


def test_curves_of_long_runs_keep_what_sticks_out(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    rows = [{"step": step, "reward": 100.0 if step == 7777 else 0.5, "loss": None if step == 12 else 0.1} for step in range(1, 20_001)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers = Answers([tmp_path])
    curves = answers.ask("curves", {"name": "a", "keys": "reward,loss,nobody", "points": "300"})["curves"]
    assert curves.keys() == {"reward", "loss"} and len(curves["reward"]["step"]) <= 300
    assert max(curves["reward"]["high"]) == 100.0 and min(curves["reward"]["low"]) == 0.5 and curves["loss"]["broken"] == [12]
    near = answers.ask("curves", {"name": "a", "keys": "reward", "begin": "7770", "end": "7780"})["curves"]["reward"]
    assert near["step"] == list(range(7770, 7781)) and near["value"][7] == 100.0


def test_a_file_is_read_as_it_grows_and_anew_when_a_resumed_run_replaces_it(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "reward": 0.5}\n{"step": 2, "rew')
    metrics = Metrics(tmp_path).read()
    assert [*metrics.pairs("reward")] == [(1, 0.5)]
    with file.open("a") as out:
        out.write('ard": 0.6}\n{"step": 2, "eval_reward": 0.9}\nnot json\n{"step": 3, "kl": 1}\n')
    assert [*metrics.read().pairs("reward")] == [(1, 0.5), (2, 0.6)] and metrics.row(2) == {"reward": 0.6, "eval_reward": 0.9}
    assert metrics.damaged == [4] and list(metrics.steps) == [1, 2, 3]
    draft = tmp_path / "draft"
    draft.write_text('{"step": 1, "reward": 0.5}\n')
    draft.replace(file)
    assert list(metrics.read().steps) == [1]
    file.unlink()
    assert list(metrics.read().steps) == []


def test_the_last_row_of_a_table_is_found_at_the_end_of_a_file(tmp_path):
    lines = [{"step": step, "reward": step / 10} for step in range(1, 3000)] + [{"step": 2999, "eval_reward": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3000, "rew')
    assert tail(tmp_path) == {"step": 2999, "reward": 299.9, "eval_reward": 1.0}
    assert tail(tmp_path / "nowhere") == {}


@pytest.mark.parametrize("name", ["", ".", "..", "../a", "a/../a", "/etc", "b", "a\x00", "x" * 300, "a/", "./a"])
def test_a_name_leads_to_a_run_below_the_roots_and_nowhere_else(tmp_path, name):
    page_runs.run(tmp_path / "runs", "a", steps=1)
    (tmp_path / "b").mkdir()
    (tmp_path / "b/run.yaml").write_text("a: 1")
    with pytest.raises(runs.NoRun, match="there are: a"):
        Answers([tmp_path / "runs"]).ask("run", {"name": name})


def test_a_link_out_of_the_roots_is_no_run(tmp_path):
    page_runs.run(tmp_path / "elsewhere", "secret", steps=1)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/secret").symlink_to(tmp_path / "elsewhere/secret")
    with pytest.raises(runs.NoRun):
        Answers([tmp_path / "runs"]).ask("run", {"name": "secret"})


def test_a_root_may_be_a_run_itself(tmp_path):
    folder = page_runs.run(tmp_path, "a", steps=2)
    answers = Answers([folder])
    assert [row["name"] for row in answers.ask("runs", {})["runs"]] == ["a"] and answers.ask("run", {"name": "a"})["step"] == 2


@pytest.mark.parametrize(
    ("path", "query", "said"),
    [
        ("episodes", {"reward_min": "high"}, "reward_min=high: not a number"),
        ("episodes", {"order": "fastest"}, "order=fastest: one of newest, oldest, best, worst, longest, difference"),
        ("episodes", {"page": "x"}, "page=x: not a number"),
        ("prompts", {"order": "x"}, "order=x: one of no_signal, hardest, easiest, most"),
        ("episode", {"id": "9999999"}, "episode 9999999: there is none of this number"),
        ("episode", {}, "id=: not a number"),
        ("curves", {"keys": "reward", "points": "many"}, "points=many: not a number"),
        ("moved", {"step": "x"}, "step=x: not a number"),
    ],
)
def test_a_wrong_question_is_one_line(tmp_path, path, query, said):
    page_runs.run(tmp_path, "a", steps=2)
    with pytest.raises(episodes.BadQuestion, match=said.replace("?", r"\?")):
        Answers([tmp_path]).ask(path, {"name": "a", **query})


@pytest.mark.parametrize("content", [None, b"", b"x" * 5000])
def test_a_record_that_is_not_there_or_no_database_is_said(tmp_path, content):
    folder = page_runs.run(tmp_path, "a", steps=2)
    (folder / "episodes.db").unlink()
    if content is not None:
        (folder / "episodes.db").write_bytes(content)
    with pytest.raises(episodes.NoRecord, match=r"episodes\.db"):
        Answers([tmp_path]).ask("episodes", {"name": "a"})
    assert Answers([tmp_path]).ask("machines", {"name": "a"})["engines"] == []


def test_filters_find_what_they_name(tmp_path):
    folder = page_runs.run(tmp_path, "a", steps=20)

    def found(**query: str) -> list[dict[str, Any]]:
        return episodes.page(folder, query)["rows"]

    assert {row["step"] for row in found(step="7")} == {7} and {row["prompt"] for row in found(prompt="3")} == {3}
    assert all(row["reward"] == 1.0 for row in found(reward_min="0.5")) and all(row["reward"] == 0.0 for row in found(reward_max="0.5"))
    assert {row["engine"] for row in found(engine="rollout-1")} == {"rollout-1"} and all(row["has_whole"] for row in found(whole="1"))
    tokens = [row["tokens"] for row in found(order="longest")]
    assert tokens == sorted(tokens, reverse=True)
    assert found(text="%") == [] and len(found(text="answer to 1")) == 50, "letters of a pattern are letters"
    assert episodes.page(folder, {"page": "2"})["page"] == 2 and episodes.page(folder, {})["total"] == 20 * 16


def test_a_run_that_a_writer_holds_is_read_all_the_same(tmp_path):
    folder = page_runs.run(tmp_path, "a", steps=2)
    with page_runs.Record(folder, done=2) as record:
        record.add(3, [{"prompt": 1, "reward": 1.0}])
        assert episodes.page(folder, {"step": "3"})["total"] == 1


def test_damaged_files_of_a_run_hide_nothing_else(tmp_path):
    folder = page_runs.run(tmp_path, "a", steps=4)
    for name in ("run.yaml", "starts.jsonl", "faults.jsonl", "alive.json", "rollbacks.jsonl"):
        (folder / name).write_bytes(b"\xff\xfe{[")
    run = Answers([tmp_path]).ask("run", {"name": "a"})
    assert run["step"] == 4 and run["settings"] == {} and run["events"] == []


def test_jumps_need_steps_on_both_sides(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n{"step": 2, "reward": 0.1}\n')
    assert reasons.breaks(Metrics(tmp_path).read(), "reward") == [] and reasons.moved(Metrics(tmp_path).read(), 2) == []


def bytes_read() -> int:
    """By all of this process."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone counts them")
def test_a_hundred_runs_are_listed_without_reading_them_whole(tmp_path):
    for number in range(100):
        folder = tmp_path / f"r{number}"
        folder.mkdir()
        (folder / "run.yaml").write_text("trainer: {steps: 5}")
        (folder / "metrics.jsonl").write_bytes(b'{"step": 1, "reward": 0.5}\n' * 20_000)
        os.utime(folder / "metrics.jsonl", (number, number))
    before = bytes_read()
    rows = Answers([tmp_path]).ask("runs", {})["runs"]
    assert [row["name"] for row in rows[:2]] == ["r99", "r98"]
    assert bytes_read() - before < 20_000_000, "of 54 million"


def test_machines_tell_what_each_process_does_until_the_run_has_ended(tmp_path):
    folder = page_runs.run(tmp_path, "a", steps=2)
    alive = {"time": 0, "actors": [{"name": "policy-0", "node": "n1"}], "engines": {"rollout-0": {"asked": 3}}}
    for ended, parts in ((False, {"policy-0": "backward", "elastic-0": "decode"}), (True, {"policy-0": "backward"})):
        (folder / "alive.json").write_text(json.dumps(alive | {"parts": parts, "ended": ended}))
        found = {row["name"]: row.get("now") for row in Answers([tmp_path]).ask("machines", {"name": "a"})["actors"]}
        assert found == ({"policy-0": None, "rollout-0": None} | ({} if ended else parts))


def test_an_engine_that_is_slower_than_the_others_is_marked(tmp_path):
    folder = page_runs.run(tmp_path, "a", steps=2)
    engines = {f"rollout-{i}": {"seconds_per_step": pace} for i, pace in enumerate((0.02, 0.021, 0.074, None))}
    (folder / "alive.json").write_text(json.dumps({"time": 0, "engines": engines}))
    found = {row["name"]: row.get("slow") for row in Answers([tmp_path]).ask("machines", {"name": "a"})["actors"]}
    assert found.pop("rollout-2") == pytest.approx(3.6, abs=0.1) and not any(found.values())
