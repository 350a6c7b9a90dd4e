"""A process that was started here is found again, from its first instant to its end, and no other is taken for it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import psutil
import pytest

from stacks.host import processes

VARIABLE = "FLOTILLA_TEST_PROCESS"


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["/bin/sleep", "60"], env={VARIABLE: "here"})
    yield process
    process.kill()
    process.wait()


def test_a_process_is_found_by_its_variable(sleeper: subprocess.Popen[bytes]):
    assert processes.find(sleeper.pid, VARIABLE, "here") == psutil.Process(sleeper.pid)
    assert processes.find(sleeper.pid, VARIABLE, "elsewhere") is None


def test_a_process_whose_environment_is_not_there_yet_is_waited_for(sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch):
    """What /proc shows between exec and the new program's environment, played twice."""
    answers = iter([{}, {}])
    read = psutil.Process.environ
    monkeypatch.setattr(psutil.Process, "environ", lambda process: answer if (answer := next(answers, None)) is not None else read(process))
    assert processes.find(sleeper.pid, VARIABLE, "here") == psutil.Process(sleeper.pid)


def test_a_process_that_ended_is_not_found(sleeper: subprocess.Popen[bytes]):
    sleeper.kill()
    sleeper.wait()
    assert processes.find(sleeper.pid, VARIABLE, "here") is None


def test_a_process_without_an_environment_is_another(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(processes, "EXEC_SECONDS", 0.1)
    process = subprocess.Popen(["/bin/sleep", "60"], env={})
    try:
        assert processes.find(process.pid, VARIABLE, "here") is None
    finally:
        process.kill()
        process.wait()
