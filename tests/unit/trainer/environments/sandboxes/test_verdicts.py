"""What was found of tasks reaches the runs that learn from them, as long as the tasks are the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainer.configs.data import DataConfig
from trainer.data.rows import told
from trainer.environments.sandboxes.tasks import about, rows
from trainer.environments.sandboxes.tasks.check import main
from trainer.environments.sandboxes.tasks.verdicts import Verdict, digest, read, write
from trainer.errors import ConfigError
from trainer.page import runs
from trainer.runs import faults

FOUND = {"adds": ("good", ""), "clocks": ("flaky", "its solution gets 1 at times"), "gives": ("free", "")}


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    for name in FOUND:
        for file, text in (("task.toml", ""), ("instruction.md", f"Do {name}."), ("tests/test.sh", "true\n")):
            (tmp_path / "tasks" / name / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "tasks" / name / file).write_text(text)
    return tmp_path / "tasks"


def checked(tasks: Path, file: Path | None = None) -> Path:
    file, folders = file or tasks / "verdicts.json", [tasks / name for name in FOUND]
    write(file, [Verdict(folder.name, *FOUND[folder.name], digest(folder)) for folder in folders], folders)
    return file


def names(tasks: Path, **args: Any) -> list[str]:
    return [Path(row["task"]).name for row in rows(str(tasks), **args)]


@pytest.mark.parametrize(
    ("leave_out", "left"),
    [((), ["adds", "clocks", "gives"]), ("bad", ["adds"]), (["flaky"], ["adds", "gives"]), (["weak", "free"], ["adds", "clocks"])],
)
def test_tasks_are_left_out_by_what_was_found_of_them(tasks, leave_out, left):
    checked(tasks)
    assert names(tasks, leave_out=leave_out) == left


def test_the_line_for_the_report_says_what_was_found_and_left_out(tasks, tmp_path):
    assert about(str(tasks)) == "3 tasks: 3 not checked"
    checked(tasks)
    assert about(str(tasks)) == "3 tasks: 1 good, 1 flaky, 1 free"
    said = "1 tasks: 1 good; 2 left out: clocks (flaky: its solution gets 1 at times), gives (free: passes with nothing done)"
    assert about(str(tasks), leave_out="bad") == said
    data = DataConfig(path="trainer.environments.sandboxes.tasks:rows", args={"path": str(tasks), "leave_out": ["free"]})
    assert [*told({"held": data})] == ["held: 2 tasks: 1 good, 1 flaky; 1 left out: gives (free: passes with nothing done)"]
    faults.note(tmp_path, None, said, faults.ROWS)
    assert runs.summary(tmp_path)["data"] == said
    assert [(event["kind"], event["text"]) for event in runs.events(tmp_path)] == [("data", said)]


def test_a_task_that_was_changed_since_is_not_checked(tasks):
    checked(tasks)
    (tasks / "adds/tests/test.sh").chmod(0o755)
    assert about(str(tasks)) == "3 tasks: 1 flaky, 1 free, 1 not checked"
    with pytest.raises(ConfigError, match=r"verdicts.json: 1 of 3 tasks are not checked as they are now: adds; run flotilla env check"):
        names(tasks, leave_out="bad")


def test_a_task_of_a_row_is_told_by_its_row_without_reading_its_files(tasks):
    (tasks / "adds/row").write_text("0123456789abcdef" * 4)
    (tasks / "adds/repo").symlink_to("/dev")
    assert digest(tasks / "adds") == "0123456789abcdef"


def test_a_task_that_is_checked_again_keeps_the_verdicts_of_the_others(tasks, capsys):
    checked(tasks)
    (tasks / "clocks/instruction.md").write_text("Another.")
    assert main(["check", str(tasks / "clocks"), "--runs", "1"]) == 1
    assert {name: each.verdict for name, each in read(tasks / "verdicts.json").items()} == {
        "adds": "good",
        "clocks": "broken",
        "gives": "free",
    }
    assert about(str(tasks / "clocks")) == "1 tasks: 1 broken"
    capsys.readouterr()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"leave_out": "bad"}, r"data.args.leave_out: .*verdicts.json: No such file or directory; flotilla env check writes it"),
        ({"leave_out": "wrong"}, r"data.args.leave_out: 'wrong' is no verdict; give bad, for all but good, or some of good, broken"),
        ({"verdicts": "{}/none.json"}, r"data.args.verdicts: .*none.json: No such file"),
        ({"verdicts": "{}/text"}, r"data.args.verdicts: .*text: no verdicts of flotilla env check"),
        ({"verdicts": "{}/strange"}, r"data.args.verdicts: .*strange: a: 'fine' is no verdict; they are good"),
        ({"verdicts": "{}/others"}, r"data.args.verdicts: .*others: is of other tasks, it knows none of the 3 as they are now"),
        ({"verdicts": "{}/all", "leave_out": ["good", "bad"]}, r"data.args.leave_out: .*all: leaves out all 3 tasks"),
    ],
)
def test_verdicts_that_are_not_of_these_tasks_are_said_in_one_line(args, said, tasks, tmp_path):
    (tmp_path / "text").write_text('{"a": 1}')
    (tmp_path / "strange").write_text(json.dumps([{"task": "a", "verdict": "fine"}]))
    (tmp_path / "others").write_text(json.dumps([{"task": "adds", "verdict": "good", "digest": "0" * 16}]))
    checked(tasks, tmp_path / "all")
    given = {name: value.format(tmp_path) if isinstance(value, str) else value for name, value in args.items()}
    with pytest.raises(ConfigError, match=said) as caught:
        names(tasks, **given)
    assert "\n" not in str(caught.value)


def test_verdicts_that_cannot_be_kept_are_an_error(tasks, tmp_path, capsys):
    assert main(["check", str(tasks), "--runs", "1", "--verdicts", str(tmp_path / "none/verdicts.json")]) == 2
    assert "error: --verdicts: " in capsys.readouterr().err
