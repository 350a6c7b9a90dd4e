"""Rows of repositories at a commit: written as tasks, and graded by tests that the policy's own files do not reach."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainer.configs.sandbox import SandboxConfig
from trainer.environments.sandboxes.episode import Sandboxes
from trainer.environments.sandboxes.machine import Machine
from trainer.environments.sandboxes.spec import Spec
from trainer.environments.sandboxes.tasks import rows
from trainer.environments.sandboxes.tasks.check import judged
from trainer.environments.sandboxes.tasks.grading import Grade, graded, prepared, solve
from trainer.environments.sandboxes.tasks.reading import read
from trainer.errors import ConfigError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")

FILES = {
    "sums/__init__.py": "def add(a, b):\n    return a - b\n\n\ndef twice(a):\n    return 2 * a\n",
    "tests/test_sums.py": "import sums\n\n\ndef test_twice():\n    assert sums.twice(2) == 4\n",
    "conftest.py": "",
}
PATCH = """\
--- a/sums/__init__.py
+++ b/sums/__init__.py
@@ -1,4 +1,4 @@
 def add(a, b):
-    return a - b
+    return a + b


"""
TEST_PATCH = """\
--- a/tests/test_sums.py
+++ b/tests/test_sums.py
@@ -3,3 +3,7 @@

 def test_twice():
     assert sums.twice(2) == 4
+
+
+def test_add():
+    assert sums.add(2, 2) == 4
"""
ADD, TWICE = "tests/test_sums.py::test_add", "tests/test_sums.py::test_twice"


@pytest.fixture(scope="module")
def repos(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A clone, and its commit."""
    folder = tmp_path_factory.mktemp("repos")
    clone = folder / "owner/sums"
    for name, text in FILES.items():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_text(text)
    git = ["git", "-C", str(clone), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    return folder, subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def tasks(repos: tuple[Path, str], tmp_path: Path) -> Any:
    def made(**changes: Any) -> Path:
        row = {
            "instance_id": "owner__sums-1",
            "repo": "owner/sums",
            "base_commit": repos[1],
            "problem_statement": "add subtracts.",
            "FAIL_TO_PASS": json.dumps([ADD]),
            "PASS_TO_PASS": [TWICE],
            "patch": PATCH,
            "test_patch": TEST_PATCH,
            **changes,
        }
        (tmp_path / "rows.jsonl").write_text(json.dumps({key: value for key, value in row.items() if value is not None}) + "\n")
        [found] = rows(str(tmp_path / "rows.jsonl"), repos=str(repos[0]))
        assert found["prompt"] == "add subtracts.\n\nThe repository is in /testbed."
        return Path(found["task"])

    return made


@pytest.fixture
def sandboxes() -> Iterator[Sandboxes]:
    found = Sandboxes(SandboxConfig(provider="namespaces"))
    yield found
    found.close()


SITE = str(Path(pytest.__file__).parents[1])
SPEC = Spec(folders={"/site": SITE}, env={"PYTHONPATH": "/site", "PYTHONDONTWRITEBYTECODE": "1"}, memory_mb=512, timeout=60)


def worth(sandboxes: Sandboxes, folder: Path, program: str, *, partial: bool = False) -> Grade:
    async def tried() -> Grade:
        task = read(folder)
        machine: Machine = await prepared(task, SPEC, sandboxes)
        try:
            await solve(task, machine, program)
            return await graded(task, machine, partial=partial)
        finally:
            machine.close()

    return asyncio.run(tried())


def test_a_row_is_a_task_that_its_patch_solves(tasks, sandboxes):
    folder = tasks()
    assert worth(sandboxes, folder, (folder / "solution/solve.sh").read_text()).reward == 1
    nothing = worth(sandboxes, folder, "true", partial=True)
    assert (nothing.reward, nothing.passed, nothing.tests) == (0.5, 1, 2), "what passed before still does"
    assert not (folder / "environment/repo/.git").exists(), "whose history may have the solution"
    assert "test_add" not in (folder / "environment/repo/tests/test_sums.py").read_text()
    verdict = asyncio.run(judged(folder, folder, sandboxes, SPEC, 1))
    assert verdict.verdict == "good", verdict


@pytest.mark.parametrize(
    "program",
    [
        "echo 'def pytest_runtest_call(item): item.runtest = lambda: None' > /testbed/conftest.py",
        "echo 'def pytest_runtest_call(item): item.runtest = lambda: None' > /testbed/tests/conftest.py",
        "printf '[pytest]\\naddopts = --collect-only\\n' > /testbed/pytest.ini",
        "printf '[tool.pytest.ini_options]\\naddopts = \"--collect-only\"\\n' > /testbed/pyproject.toml",
        "printf '[tool:pytest]\\naddopts = --collect-only\\n' > /testbed/tests/setup.cfg",
        "printf 'def test_add(): pass\\ndef test_twice(): pass\\n' > /testbed/tests/test_sums.py",
        "echo 'import os; os._exit(0)' > /testbed/pytest.py",
        "mkdir -p /tests && echo 'exit 0' > /tests/test.sh && mkdir -p /logs/verifier && echo 1 > /logs/verifier/reward.txt",
    ],
    ids=[
        "conftest",
        "conftest beside tests",
        "settings",
        "the project's settings",
        "settings beside tests",
        "tests",
        "a pytest of its own",
        "the grader's files",
    ],
)
def test_what_decides_is_not_the_policy_s_to_write(tasks, sandboxes, program):
    assert worth(sandboxes, tasks(), program).reward == 0


def test_rows_are_written_once_and_again_when_they_change(tasks):
    folder = tasks()
    (folder / "mark").touch()
    assert (tasks() / "mark").is_file()
    assert not (tasks(problem_statement="add subtracts.", test_patch=TEST_PATCH + "\n") / "mark").is_file()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"base_commit": None}, "rows.jsonl:1: no base_commit; rows of repositories have"),
        ({"base_commit": "0" * 40}, "git archive 0000"),
        ({"base_commit": "--output=/tmp/x"}, "git archive --output=/tmp/x"),
        ({"repo": "owner/other"}, "no such folder; clone owner/other there"),
        ({"instance_id": "../x"}, "instance_id: '../x'; letters"),
        ({"FAIL_TO_PASS": "[]"}, "FAIL_TO_PASS is empty"),
        ({"FAIL_TO_PASS": "test_add"}, "FAIL_TO_PASS: 'test_add'; a list of pytest's names"),
        ({"PASS_TO_PASS": ["../../etc/test_x.py::a"]}, "PASS_TO_PASS:"),
        ({"FAIL_TO_PASS": ["tests/test_none.py::test_x"]}, "tests are in tests/test_none.py, not there"),
        ({"patch": "--- a/none.py\n+++ b/none.py\n@@ -1 +1 @@\n-a\n+b\n"}, "patch: does not apply: error: none.py"),
        ({"test_patch": "no patch"}, "test_patch: does not apply"),
    ],
)
def test_a_row_that_is_no_task_is_one_line_that_names_it(tasks, changes, said):
    with pytest.raises(ConfigError, match=r"rows\.jsonl:1: ") as error:
        tasks(**changes)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_file_without_clones_or_rows_is_refused(tmp_path):
    for name, text, repos, said in (
        ("a.jsonl", "{}", "", "need data.args.repos"),
        ("a.jsonl", "", "x", "no rows"),
        ("a.jsonl", "[1]", "x", "an object is needed"),
        ("a.jsonl", "{", "x", "not JSON"),
        ("a.csv", "a", "x", "a file .jsonl or .parquet"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=said):
            list(rows(str(tmp_path / name), repos=repos))
