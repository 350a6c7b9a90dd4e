"""Tests of programs in the forms of public data sets, as values and as JSON text, and programs that start others."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from trainer.rewards.code_tests import Call, InputOutput, Statements, parse, read
from trainer.rewards.programs import code

DOUBLE = "```python\nprint(int(input()) * 2)\n```"
ADD = "```python\ndef add(a, b):\n    return a + b\n```"
SOLUTION = "```python\nclass Solution:\n    def add(self, a, b):\n        return a + b\n```"
IDLE = "```python\npass\n```"
CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3"
UNIT = "import unittest\nclass T(unittest.TestCase):\n    def test_it(self):\n        self.assertEqual(add(1, 2), 3)"
SAME = {"inputs": ["1\n", "2\n"], "outputs": ["2\n", "4\n"]}
OF_ADD = {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [[3], 7]}
FORMS: list[tuple[str, Any, str]] = [  # form, answer, a program that is right
    ("TACO's lists", SAME, DOUBLE),
    ("a list of objects", [{"input": "1", "output": "2"}, {"input": "2", "output": "4"}], DOUBLE),
    ("other names", [{"stdin": "1", "expected_output": "2"}], DOUBLE),
    ("lines", {"inputs": [["1"], ["2"]], "outputs": [["2"], ["4"]]}, DOUBLE),
    ("several in one object", {"input": ["1", "2"], "output": ["2", "4"]}, DOUBLE),
    ("APPS's column", {"input_output": json.dumps(SAME)}, DOUBLE),
    ("calls", OF_ADD, ADD),
    ("calls of a class", OF_ADD, SOLUTION),
    ("LiveCodeBench's calls", [{"input": "1\n2", "output": "3", "testtype": "functional", "metadata": {"func_name": "add"}}], ADD),
    ("MBPP", {"test_list": ["assert add(1, 2) == 3"], "test_imports": ["import math"]}, ADD),
    ("PRIME's asserts", {"assert_case": ["assert add(1, 2) == 3"]}, ADD),
    ("asserts", ["assert add(1, 2) == 3", "assert add(2, 2) == 4"], ADD),
    ("HumanEval", {"test": CHECK, "entry_point": "add"}, ADD),
    ("pytest's functions", {"tests": "from solution import add\ndef test_add():\n    assert add(1, 2) == 3"}, ADD),
    ("unittest's classes", {"test": UNIT}, ADD),
]


@pytest.mark.parametrize(("answer", "right"), [pytest.param(answer, right, id=form) for form, answer, right in FORMS])
@pytest.mark.parametrize("written", [lambda answer: answer, json.dumps, repr], ids=["values", "JSON", "Python"])
def test_a_right_program_passes_and_one_that_only_runs_does_not(answer: Any, right: str, written):
    row = {"answer": written(answer)}
    assert code(right, row) == 1.0
    assert code(IDLE, row) == 0.0


def test_text_is_statements_and_json_text_of_text_too():
    assert parse("assert f(1) == 2") == parse('"assert f(1) == 2"') == [Statements("assert f(1) == 2")]
    assert parse('[{"input": "1", "output": "2"}]') == [InputOutput("1", "2")]
    assert parse(json.dumps(OF_ADD)) == [Call("add", [1, 2], [3]), Call("add", [3, 4], 7)]
    assert read({"answer": json.dumps(SAME)}) == "2 of input and output"


TEXTS = [
    "",
    " \n",
    "# only words",
    "pass",
    "42",
    '"text"',
    "[]",
    "{}",
    "eJwNyDEKgDAMQNHdU3yyKsQ",
    "[1, 2]",
    "[null]",
    "import math",
    "x ==",
    CHECK,
]
LISTS = ['{"inputs": [], "outputs": []}', {"inputs": ["1"], "outputs": []}, [], {}, [7], None, 3, {"a": 1}, "def helper():\n    return 1"]


@pytest.mark.parametrize("answer", [*TEXTS, *LISTS])
def test_what_tests_nothing_is_an_error(answer: Any):
    with pytest.raises(ValueError, match=r"row\['answer'\] has (no test|a test that|the test|1 inputs)"):
        code(ADD, {"answer": answer})


RETURNED = [("(1, 2)", [1, 2], 1), ("0.1 + 0.2", 0.3, 1), ("1", True, 0), ("'1'", 1, 0), ("{1: 2}", {"1": 2}, 1), ("{1}", [1], 0)]


@pytest.mark.parametrize(("returned", "wanted", "worth"), [*RETURNED, ("None", None, 1)])
def test_what_a_call_returns_is_compared_as_json_has_it(returned: str, wanted: Any, worth: float):
    assert code(f"def f(x):\n    return {returned}", {"answer": {"fn_name": "f", "inputs": [[1]], "outputs": [wanted]}}) == worth


DAEMONS = {
    "session": "if os.fork() == 0:\n    os.setsid()\n    time.sleep(600)",
    "double fork": "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(600)\n    os._exit(0)",
    "popen": "subprocess.Popen(['sleep', '600'], start_new_session=True)",
    "nohup": "os.system('nohup setsid sleep 600 >/dev/null 2>&1 &')",
    "several": "for _ in range(5):\n    if os.fork() == 0:\n        os.setsid()\n        os.fork()\n        time.sleep(600)",
}


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="Linux alone adopts what a process leaves behind")
@pytest.mark.parametrize("late", [False, True], ids=["ends", "hangs"])
@pytest.mark.parametrize("started", DAEMONS.values(), ids=DAEMONS)
def test_nothing_that_a_program_starts_outlives_its_test(started: str, late: bool, tmp_path: Path):
    program = f"import os, subprocess, time\nos.chdir({str(tmp_path)!r})\n{started}\nprint(2)\n" + "time.sleep(600)\n" * late
    assert code(program, {"answer": [{"input": "", "output": "2"}]}, seconds=3 if late else 60) == float(not late)
    deadline = time.monotonic() + 120
    while left := [entry.name for entry in Path("/proc").iterdir() if entry.name.isdigit() and _is_in(entry, tmp_path)]:
        assert time.monotonic() < deadline, f"{left} live on"
        time.sleep(0.05)


def _is_in(process: Path, folder: Path) -> bool:
    try:
        return (process / "cwd").readlink() == folder
    except OSError:
        return False
