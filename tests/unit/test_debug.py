"""What `flotilla debug` says of processes that it has read, and of those that it has not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster_tasks.debug import probe, stacks
from cluster_tasks.debug.stacks import Known
from lab.waiting import wait_for

C10D = "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
RAY = "/venv/lib/python3.11/site-packages/ray/_private/worker.py"
ENGINE = "/tmp/ray/session/runtime_resources/working_dir_files/_ray_pkg_0a1b/trainer/engine.py"
MAIN = ["Worker.main_loop", RAY, 1069]


def thread(*frames: list[Any], name: str = "MainThread", code: str = "") -> dict[str, Any]:
    return {"name": name, "active": False, "frames": list(frames), "code": code}


def process(pid: int, *command: str, threads: list[Any] | None = None, parent: int = 0, **more: Any) -> dict[str, Any]:
    return {"pid": pid, "parent": parent, "command": list(command)} | ({"threads": threads} if threads else {}) | more


def rank(pid: int, *frames: list[Any], code: str = "") -> dict[str, Any]:
    return process(pid, f"ray::policy-{pid}:Rank.step", threads=[thread(*frames, MAIN, code=code)])


def said(*found: dict[str, Any], known: dict[tuple[str, int], Known] | None = None) -> list[str]:
    return list(stacks.shown(stacks.processes({"0": {"processes": found}}, known or {})))


REDUCE = (["all_reduce", C10D, 3252], ["Rank.step", ENGINE, 88])


def test_equal_stacks_are_together_the_odd_one_first():
    lines = said(*[rank(i, *REDUCE) for i in range(3)], rank(3, ["Rank.step", ENGINE, 70], code="time.sleep(9)"))
    assert lines[:4] == [
        "1 process, time.sleep",
        "  policy-3 (node 0, pid 3)",
        "      Rank.step (working_dir_files/_ray_pkg_0a1b/trainer/engine.py:70)    time.sleep(9)".replace(
            "working_dir_files/_ray_pkg_0a1b/", ""
        ),
        "",
    ]
    assert lines[4] == "3 processes, all_reduce"


@pytest.mark.parametrize(
    ("last", "text"),
    [
        (rank(2, ["Rank.step", ENGINE, 70], code="time.sleep(9)"), "for policy-2 (node 0, pid 2): in step, time.sleep at Rank.step"),
        (rank(2), "for policy-2 (node 0, pid 2): in step, idle"),
        (rank(2, ["barrier", C10D, 9], ["Rank.step", ENGINE, 90]), "wait for each other in different places"),
        (rank(2, *REDUCE), "each has come, so the network or a GPU holds it, or a rank has died"),
    ],
)
def test_who_holds_up_a_collective(last, text):
    assert text in "\n".join(said(rank(0, *REDUCE), rank(1, *REDUCE), last))


def test_a_driver_waits_for_the_actors_of_its_own_job():
    get = thread(["Worker.get_objects", RAY, 1], ["get", RAY, 2], ["main", "/job/train.py", 5])
    known = {("0", 9): Known("driver of a", "01"), ("0", 1): Known("rollout-0", "01"), ("0", 2): Known("other", "02")}
    work = [process(i, "ray::Engine.sample", threads=[thread(["sample", ENGINE, 3])]) for i in (1, 2)]
    text = "\n".join(said(process(9, "python", "train.py", threads=[get]), *work, known=known)).partition("who waits")[2]
    assert "driver of a, train.py (node 0, pid 9) waits in ray.get" in text and "rollout-0" in text and "other" not in text


def test_one_that_cannot_be_read_says_why_and_the_rest_is_shown():
    text = "\n".join(said(process(5, "python", "-m", "vllm.entrypoints", error=probe.DENIED), rank(0, *REDUCE)))
    assert "1 process, not read" in text and "no ptrace rights (root, the capability SYS_PTRACE" in text and "all_reduce" in text


def test_rays_own_processes_and_the_agent_are_counted_alone():
    own = process(7, "/bin/python", "/site-packages/ray/dashboard/dashboard.py", threads=[thread(["run", RAY, 1])])
    child = process(8, "python", "-c", threads=[thread(["run", RAY, 1])], parent=7)
    agent = process(6, "python3", "node", threads=[thread(["pause", "/b/node/waiting.py", 1])])
    assert said(own, child, agent)[-1] == "0 processes with 0 different stacks on 1 node; 3 of Ray and the node agents not shown (--all)"


def test_arguments_of_commands_stay_on_the_node():
    assert probe.program(["python", "-u", "-m", "trainer.train_ppo", "--key=sk-1"]) == ["python", "-u", "-m", "trainer.train_ppo"]
    assert probe.program(["python", "train.py", "--key=sk-1"]) == ["python", "train.py"]
    assert probe.program(["python", "-uc", "key = 'sk-1'"]) == ["python", "-c"]
    assert probe.program(["python", "-uc", "from trainer.rewards.worker import serve"]) == ["python", "-m", "trainer.rewards.worker"]


@pytest.fixture
def sleeping(tmp_path: Path):
    """A shell, and below it a Python that sleeps."""
    file = tmp_path / "nap.py"
    file.write_text("import time\nprint('up', flush=True)\ntime.sleep(600)\n")
    command = f"{sys.executable} {file} sk-secret; true"
    with subprocess.Popen(["/bin/sh", "-c", command], stdout=subprocess.PIPE, text=True, start_new_session=True) as shell:
        assert shell.stdout and shell.stdout.readline() == "up\n"
        yield shell.pid
        os.killpg(shell.pid, 9)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_probe_reads_what_is_below_a_process_with_the_line_it_is_at(sleeping):
    def read() -> dict[str, Any]:
        [found] = probe.look(sleeping)["processes"]
        return found if found.get("threads", [{}])[0].get("code") else {}

    found = wait_for("it to sleep", read, 20)
    assert found["threads"][0]["code"] == "time.sleep(600)"
    assert "sk-secret" not in str(found)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_node_without_py_spy_and_one_where_it_may_not_read(sleeping, tmp_path, monkeypatch):
    monkeypatch.setattr(probe.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    [found] = probe.look(sleeping)["processes"]
    assert found["error"].startswith("py-spy is not installed on this node")
    (tmp_path / "py-spy").write_text(
        "#!/bin/sh\necho 'Error: Permission Denied: Try running again with elevated permissions' >&2; exit 1\n"
    )
    (tmp_path / "py-spy").chmod(0o755)
    [found] = probe.look(sleeping)["processes"]
    assert found["error"] == probe.DENIED
