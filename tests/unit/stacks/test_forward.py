"""The forward of a control node's port: opened where nothing answers, opened again when it breaks, gone with who opened it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stacks.host.forward import NoForward, answers, opened

ROOT = Path(__file__).parents[3]
# Plays a cloud's command: serves /healthcheck on the port in place of a server behind it.
SERVES = """
import http.server, sys

class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/healthcheck" else 404)
        self.end_headers()

    def log_message(self, *_):
        pass

print("Waiting for connections...", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Healthy).serve_forever()
"""


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


@pytest.fixture
def command(tmp_path: Path, port: int) -> str:
    """Notes its process, and serves."""
    (tmp_path / "serves.py").write_text(SERVES)
    return f"sh -c 'echo $$ >>{tmp_path}/pids; exec {sys.executable} {tmp_path}/serves.py {port}'"


def until(what: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 120
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def pids(folder: Path) -> list[int]:
    file = folder / "pids"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def gone(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_it_is_open_while_the_block_runs_and_says_what_it_runs(command: str, port: int, tmp_path: Path) -> None:
    said: list[str] = []
    server = f"http://127.0.0.1:{port}"
    with opened(server, command, 30, said.append):
        assert answers(server) and said == [f"$ {command}"]
    assert not answers(server) and until(lambda: gone(pids(tmp_path)[0]))


def test_it_is_opened_again_when_it_breaks(command: str, port: int, tmp_path: Path) -> None:
    with opened(f"http://127.0.0.1:{port}", command, 30, lambda _: None):
        os.kill(pids(tmp_path)[0], signal.SIGKILL)
        assert until(lambda: len(pids(tmp_path)) == 2 and answers(f"http://127.0.0.1:{port}"))


def test_it_ends_with_who_opened_it_though_that_is_killed(command: str, port: int, tmp_path: Path) -> None:
    program = "import sys, time\nfrom stacks.host.forward import opened\n"
    program += "with opened(sys.argv[1], sys.argv[2], 30, print):\n    print('open', flush=True)\n    time.sleep(600)\n"
    process = subprocess.Popen(
        [sys.executable, "-c", program, f"http://127.0.0.1:{port}", command], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout and any(line == "open\n" for line in process.stdout)
    process.kill()
    process.wait()
    assert until(lambda: gone(pids(tmp_path)[0])) and until(lambda: not answers(f"http://127.0.0.1:{port}"))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("no-such-program-of-a-cloud", "the control node is not reached: .*no-such-program-of-a-cloud: not found"),
        ("echo 'An error occurred (AccessDeniedException) when calling StartSession' >&2; false", r"AccessDeniedException\) when calling"),
        ("echo 'SessionManagerPlugin is not found. Please refer to ...' >&2; false", "SessionManagerPlugin is not found"),
    ],
)
def test_what_waiting_cannot_fix_is_said_at_once(command: str, message: str, port: int) -> None:
    begin = time.monotonic()
    with pytest.raises(NoForward, match=message), opened(f"http://127.0.0.1:{port}", command, 600, lambda _: None):
        pass
    assert time.monotonic() - begin < 300


def test_a_machine_that_does_not_come_is_given_up_with_its_clouds_last_word(port: int) -> None:
    message = rf"http://127.0.0.1:{port} has not answered within 5 s of its forward: .*TargetNotConnected"
    command = "echo 'An error occurred (TargetNotConnected)' >&2; false"
    with pytest.raises(NoForward, match=message), opened(f"http://127.0.0.1:{port}", command, 5, lambda _: None):
        pass
