"""The command `flotilla` on a real Ray cluster of this machine: the same verbs as in every place."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator

import psutil
import pytest
from support.local_project import Project

from cluster_tasks.local.plan import MARKER

pytestmark = [pytest.mark.wide, pytest.mark.skipif(sys.platform != "linux", reason="the local cluster is for Linux")]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """With its cluster up."""
    made = Project(tmp_path_factory.mktemp("flotilla"))
    try:
        code, output, error = made.run("up", "local")
        assert code == 0, output + error
        assert "dashboard  http://127.0.0.1:" in output
        yield made
    finally:
        made.run("down", "local")


def test_a_job_prints_its_own_lines_alone_and_its_code_is_that_of_submit_and_logs(project: Project) -> None:
    program = "print('HEARD'); print('\\xe9'); raise SystemExit(3)"
    code, output, error = project.run("submit", "local", "--name", "first", "--", "python", "-c", program)
    assert (code, output) == (3, "HEARD\né\n"), error
    assert error.splitlines()[-3:] == [
        "first submitted successfully",
        "  follow  flotilla logs local first",
        "  stop    flotilla down local --job first",
    ]
    assert project.run("logs", "local")[:2] == (3, "HEARD\né\n")  # the newest
    assert project.run("logs", "local", "first", "--no-follow")[:2] == (0, "HEARD\né\n")


def test_ctrl_c_ends_the_watching_and_down_the_job(project: Project) -> None:
    watching = project.start("submit", "local", "--name", "long", "--", "sh", "-c", "echo BEGUN; sleep 600")
    assert watching.stdout and watching.stderr
    assert watching.stdout.readline() == "BEGUN\n"
    watching.send_signal(signal.SIGINT)
    error = watching.stderr.read()
    assert watching.wait(60) == 130
    assert error.splitlines()[-3:] == [
        "long is still running",
        "  follow  flotilla logs local long",
        "  stop    flotilla down local --job long",
    ]
    assert "Traceback" not in error
    assert project.state("long") == "RUNNING"
    assert project.run("down", "local", "--job", "long")[0] == 0
    assert project.run("logs", "local", "long")[0] != 0  # follows it to its end
    assert project.state("long") == "STOPPED"


def test_no_wait_returns_and_a_job_that_is_none_is_one_line(project: Project) -> None:
    code, output, error = project.run("submit", "local", "--name", "quick", "--no-wait", "--", "true")
    assert (code, output) == (0, "") and "flotilla logs local quick" in error
    assert project.run("logs", "local", "quick")[0] == 0
    code, output, error = project.run("logs", "local", "nothing")
    assert (code, output, len(error.splitlines())) == (2, "", 1) and "no such job" in error


def test_status_is_for_people_and_programs_and_down_leaves_nothing(project: Project) -> None:
    code, output, _ = project.run("status", "local", "--json")
    assert code == 0 and json.loads(output)["up"]
    assert project.run("down", "local")[0] == 0
    root = str((project.folder / "build/local").resolve())
    assert not [process.pid for process in psutil.process_iter() if marked(process, root)]
    code, output, _ = project.run("status", "local")
    assert code == 1 and "not up" in output
    code, _, error = project.run("submit", "local", "--", "true")
    assert code == 2 and error == "error: the cluster local is not up; first: flotilla up local\n"


def marked(process: psutil.Process, root: str) -> bool:
    try:
        return process.environ().get(MARKER) == root
    except psutil.Error:
        return False
