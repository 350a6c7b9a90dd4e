"""Whatever ends a local cluster, no process of it is left. The nodes here are shells, and their children try to get away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from cluster_tasks.local.supervisor import NodeProcess, Plan

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="subreapers and parent-death signals are Linux's")

# A child in its own session whose parent has ended, a child that ignores SIGTERM, and the node itself.
WILD = "(setsid sleep 300 &) ; (trap '' TERM HUP INT; sleep 300) & sleep 300 & wait"
ROOT = Path(__file__).parents[4]

Launch = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Starts a supervisor for nodes with these commands and waits until it has started them."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*commands: str, stop_seconds: int = 1) -> subprocess.Popen[bytes]:
        nodes = [
            NodeProcess(rank, ["/bin/sh", "-c", command], {"PATH": "/usr/bin:/bin"}, str(tmp_path), str(tmp_path / f"node-{rank}.log"))
            for rank, command in enumerate(commands)
        ]
        process = subprocess.Popen(
            [sys.executable, "-m", "cluster_tasks.local.supervisor"],
            stdin=subprocess.PIPE,
            stdout=(tmp_path / "supervisor.log").open("wb"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=ROOT,
        )
        started.append(process)
        assert process.stdin is not None
        Plan(nodes=nodes, stop_seconds=stop_seconds).send(process.stdin)
        until(lambda: (tmp_path / "supervisor.log").read_text().count("started") == len(commands))
        return process

    yield start
    for process in started:
        for left in [*psutil.Process(process.pid).children(recursive=True), process] if process.poll() is None else []:
            left.kill()


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.02)


def tree(process: subprocess.Popen[bytes], sleeps: int) -> list[psutil.Process]:
    """All processes below the guard, as soon as these many `sleep` are among them."""

    def sleeping() -> list[psutil.Process]:
        return [p for p in psutil.Process(process.pid).children(recursive=True) if p.name() == "sleep"]

    until(lambda: len(sleeping()) == sleeps)
    return psutil.Process(process.pid).children(recursive=True)


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive


def test_the_head_decides_when_the_cluster_ends_and_with_which_code(launch: Launch, tmp_path: Path) -> None:
    guard = launch("until [ -e go ]; do sleep 0.1; done; exit 75", WILD)
    below = tree(guard, 4)
    (tmp_path / "go").touch()
    assert guard.wait(60) == 75
    assert_gone(below)


def test_sigterm_asks_the_head_before_the_workers(launch: Launch, tmp_path: Path) -> None:
    note = "trap 'echo {name} >> order; exit 0' TERM; sleep 300 & wait"
    guard = launch(note.format(name="head"), note.format(name="worker"), stop_seconds=60)
    below = tree(guard, 2)
    guard.terminate()
    assert guard.wait(60) == 0
    assert (tmp_path / "order").read_text().split() == ["head", "worker"]
    assert_gone(below)


def test_kill_9_of_the_supervisor_leaves_nothing(launch: Launch) -> None:
    guard = launch(WILD, WILD)
    below = tree(guard, 6)
    [supervisor] = psutil.Process(guard.pid).children()
    supervisor.kill()
    guard.wait(60)
    assert_gone(below)


def test_kill_9_of_the_guard_leaves_nothing(launch: Launch) -> None:
    guard = launch(WILD, WILD)
    below = tree(guard, 6)
    guard.kill()
    guard.wait(60)
    assert_gone(below)


def test_the_end_of_the_launcher_is_the_end_of_the_cluster_until_it_lets_go(launch: Launch) -> None:
    held, released = launch(WILD), launch(WILD)
    below, beyond = tree(held, 3), tree(released, 3)
    assert held.stdin is not None
    assert released.stdin is not None
    os.write(released.stdin.fileno(), b"d")
    released.stdin.close()
    held.stdin.close()
    held.wait(60)
    assert_gone(below)
    assert released.poll() is None
    assert all(process.is_running() for process in beyond)
    os.kill(released.pid, signal.SIGTERM)
    released.wait(60)
    assert_gone(beyond)


def test_a_worker_that_ends_leaves_the_others_alone(launch: Launch, tmp_path: Path) -> None:
    guard = launch("sleep 300", "exit 3")
    until(lambda: "node 1 ended with exit code 3" in (tmp_path / "supervisor.log").read_text())
    assert guard.poll() is None
    guard.terminate()
    guard.wait(60)
