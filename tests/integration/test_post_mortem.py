"""A task that raises and waits, on a real Ray cluster of two nodes: it is listed, a debugger reaches it, and its job ends afterwards."""

from __future__ import annotations

import argparse
import json
import os
import pty
import re
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli import debug
from cluster_tasks.debug import post_mortem
from cluster_tasks.identity import TOKEN, KnownDashboard, environment
from lab.local import Cluster, render
from lab.waiting import wait_for
from stacks.schema import Stack

pytest.importorskip("debugpy")
pytestmark = [pytest.mark.wide, pytest.mark.skipif(sys.platform != "linux", reason="the local cluster is for Linux")]

FLEET = {"name": "laptop", "nodes": 2, "cpus": 1}
STACK = Stack.model_validate({"name": "local", "cloud": "local", "fleets": [FLEET], "task": {"fleets": ["laptop"]}})
JOB = """
import ray
ray.init()
@ray.remote(max_retries=0)
def reward(answer):
    raise ValueError(f"no number in {answer!r}")
ray.get(reward.remote("none"))
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = render(tmp_path_factory.mktemp("held"), FLEET)
    (made.root / "env.sh").write_text(f"export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={made.root / TOKEN}\n")
    done = made.local("up")
    assert done.returncode == 0, done.stdout + done.stderr
    yield made
    made.local("down", "--timeout", "20")


class Debugger:
    """A client of the Debug Adapter Protocol, as far as a test of ours needs it."""

    def __init__(self, host: str, port: int):
        self.socket = socket.create_connection((host, port), timeout=60)
        self.stream, self.sent = self.socket.makefile("rb"), 0

    def send(self, command: str, **arguments: Any) -> None:
        self.sent += 1
        body = json.dumps({"seq": self.sent, "type": "request", "command": command, "arguments": arguments}).encode()
        self.socket.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))

    def until(self, **wanted: str) -> dict[str, Any]:
        """The first message of this kind."""
        while True:
            length = 0
            while line := self.stream.readline().strip():
                length = int(line.partition(b":")[2]) if line.lower().startswith(b"content-length") else length
            assert length, f"the debugger closed the connection before {wanted}"
            said = json.loads(self.stream.read(length))
            if wanted.items() <= said.items():
                return said


def start(asked: KnownDashboard, folder: Path, variables: dict[str, str]) -> str:
    (script := folder / "job.py").write_text(JOB)
    return asked.ask("/api/jobs/", {"entrypoint": f"{sys.executable} {script}", "runtime_env": {"env_vars": variables}})["submission_id"]


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, *command: str, env: dict[str, str]):
        self.end, its = pty.openpty()
        self.process = subprocess.Popen(command, stdin=its, stdout=its, stderr=its, env=env, start_new_session=True)
        os.close(its)
        self.said = ""

    def until(self, words: str, answer: str) -> None:
        """Types the answer when it has printed the words."""
        deadline = time.monotonic() + 60
        while words not in self.said:
            assert time.monotonic() < deadline, f"no {words!r} in {self.said}"
            if select.select([self.end], [], [], 1)[0]:
                self.said += os.read(self.end, 4096).decode(errors="replace")
        self.said = self.said.partition(words)[2]
        os.write(self.end, f"{answer}\n".encode())


@pytest.mark.slow
def test_rays_older_debugger_is_for_a_terminal_of_the_same_node(cluster, tmp_path):
    asked = KnownDashboard.of(cluster.url, environment(cluster.root, cluster.url))
    job = start(asked, tmp_path, {"RAY_DEBUG": "legacy", "RAY_DEBUG_POST_MORTEM": "1"})
    logs = wait_for("the task to pause", lambda: said if "RemotePdb" in (said := asked.ask(f"/api/jobs/{job}/logs")["logs"]) else "", 120)
    [address] = re.findall(r"Using address (\S+) ", logs)
    env = os.environ | environment(cluster.root, cluster.url) | {"RAY_ADDRESS": address}
    terminal = Terminal(str(Path(sys.executable).with_name("ray")), "debug", "--address", address, env=env)
    try:
        terminal.until("Enter breakpoint index", "0")
        terminal.until("(Pdb) ", "p answer")
        terminal.until("'none'", "c")
        assert wait_for("the job to end", lambda: asked.exit_code(job), 120) == 1
    finally:
        terminal.process.kill()
        terminal.process.wait()


def test_a_task_that_raised_waits_for_a_debugger_and_its_job_ends_when_that_leaves(cluster, tmp_path, capsys):
    asked = KnownDashboard.of(cluster.url, environment(cluster.root, cluster.url))
    job = start(asked, tmp_path, post_mortem.ENABLED)
    [held] = wait_for("the task to pause", lambda: [held for held in post_mortem.paused(asked) if held.task == "reward"], 120)
    assert held.node in ("127.0.0.2", "127.0.0.3")
    assert debug.show_paused(STACK, cluster.root.parents[1], argparse.Namespace()) == 0
    said = capsys.readouterr().out
    assert f"reward  node {held.node}, pid {held.pid}, debugpy on {held.node}:{held.port}" in said
    assert f'"connect": {{"host": "{held.node}", "port": {held.port}}}' in said
    assert asked.exit_code(job) is None, "it waits"

    debugger = Debugger(held.node, held.port)
    debugger.send("initialize", adapterID="python", pathFormat="path")
    assert debugger.until(type="response", command="initialize")["success"]
    debugger.send("attach", justMyCode=False)
    debugger.until(type="event", event="initialized")
    debugger.send("setExceptionBreakpoints", filters=["uncaught"])
    debugger.send("configurationDone")
    stopped = debugger.until(type="event", event="stopped")["body"]
    debugger.send("stackTrace", threadId=stopped["threadId"])
    [top, *_] = debugger.until(type="response", command="stackTrace")["body"]["stackFrames"]
    assert top["name"].startswith("reward"), top
    debugger.send("evaluate", expression="answer", frameId=top["id"], context="repl")
    assert debugger.until(type="response", command="evaluate")["body"]["result"] == "'none'"
    debugger.send("disconnect")
    assert wait_for("the job to end", lambda: asked.exit_code(job), 120) == 1
    assert "no number in 'none'" in asked.ask(f"/api/jobs/{job}/logs")["logs"]
    assert post_mortem.paused(asked) == []
