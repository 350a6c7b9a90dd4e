"""`python -m fleets.server`: a dstack server of one's own, started, found again, logged into and stopped by its commands."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from cluster_tasks.node.ports import free_port
from fleets.server.process import Server

pytestmark = pytest.mark.hosts

SECONDS = 300  # on a busy machine
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "build/server"


@pytest.fixture
def server(tmp_path: Path, folder: Path) -> Iterator[Command]:
    """Runs a command of the module in an otherwise empty project; ends at last what it has started."""
    (tmp_path / "Pulumi.yaml").touch()
    home = {"HOME": str(tmp_path), "GPUHUNT_CATALOG_URL": f"file://{tmp_path}/none"}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DSTACK_")} | home

    def run(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        patience = ["--timeout", str(SECONDS)] if arguments[0] == "up" and "--timeout" not in arguments else []
        command = [sys.executable, "-P", "-m", "fleets.server", *arguments, *patience]
        limit = SECONDS + 60
        return subprocess.run(command, cwd=tmp_path, env=environment | more, capture_output=True, text=True, timeout=limit, check=False)

    yield run
    if left := Server.running(folder):
        left.stop()


def render(folder: Path, stack: str, config: str) -> None:
    (folder.parent / stack).mkdir(parents=True)
    (folder.parent / stack / "server-config.yml").write_text(config)


def test_the_life_of_a_server(server, folder, tmp_path):
    port = free_port()
    started = server("up", "--port", str(port))
    assert started.returncode == 0, started.stderr
    assert f"started  http://127.0.0.1:{port}," in started.stdout
    first = Server.running(folder)
    assert first is not None

    again = server("up")
    assert again.returncode == 0 and "already up" in again.stdout
    assert Server.running(folder) == first
    moved = server("up", "--port", str(free_port()))
    assert moved.returncode == 2 and f"the server is up on http://127.0.0.1:{port}; to move it:" in moved.stderr

    logged_in = server("login")
    assert logged_in.returncode == 0, logged_in.stderr
    config = tmp_path / ".dstack/config.yml"
    token = (folder / "token").read_text()
    assert yaml.safe_load(config.read_text())["projects"] == [{"name": "main", "url": first.url, "token": token, "default": True}]
    listed = subprocess.run(
        [Path(sys.executable).with_name("dstack"), "fleet"], env={"HOME": str(tmp_path), "PATH": os.environ["PATH"]}, check=False
    )
    assert listed.returncode == 0  # dstack's own command finds it
    absent = server("login", "--project", "other")
    assert absent.returncode == 2 and f"--project: {first.url} has no project 'other'; it has main" in absent.stderr

    # The token is in no log, output or process list, and nobody else may read the files.
    process = psutil.Process(first.pid)
    texts = [(folder / "server.log").read_text(), started.stdout, again.stdout, logged_in.stdout, *process.cmdline()]
    assert not any(token in text for text in texts)
    assert [(folder / name).stat().st_mode & 0o077 for name in ("token", "config.yml", "server.log", ".")] == [0] * 4
    assert config.stat().st_mode & 0o077 == 0

    # A stack's configuration: another project, for which the server starts again on the same port, with what it knew before.
    render(folder, "team", "projects: [{name: team, backends: []}]")
    changed = server("up", "team")
    assert changed.returncode == 0 and "the configuration has changed: starting the server again" in changed.stdout, changed.stderr
    second = Server.running(folder)
    assert second is not None and (second.url, second.pid != first.pid) == (first.url, True)
    status = server("status")
    assert status.returncode == 0 and {"project     main: no backend", "project     team: no backend"} <= set(status.stdout.splitlines())

    stopped = server("down")
    assert stopped.returncode == 0 and not psutil.pid_exists(second.pid)
    assert (server("status").returncode, server("down").stdout) == (1, "not up\n")


def test_a_server_with_machines_is_not_stopped_unless_forced(server, folder, tmp_path):
    from dstack.api.server import APIClient

    from infra.dstack_resources.spec import plan

    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "key")], check=True)
    assert server("up", "--port", str(free_port())).returncode == 0
    running = Server.running(folder)
    assert running is not None
    api = APIClient(running.url, (folder / "token").read_text())
    ssh = {"user": "nobody", "port": 9, "identity_file": str(tmp_path / "key"), "hosts": ["127.0.0.77"]}  # where nobody listens
    api.fleets.apply_plan("main", plan(api, "main", {"type": "fleet", "name": "hosts", "ssh_config": ssh}))  # type: ignore[arg-type]

    refused = server("down")
    assert refused.returncode == 2
    first, machine, last = refused.stderr.splitlines()
    assert first == "error: 1 machines live, and without a server nobody ends them:"
    assert machine.split()[:2] == ["hosts-0", "pending"] and "(fleet hosts, project main)" in machine
    assert last == "first: dstack fleet delete NAME; or --force, and the next `up` finds them again"
    assert Server.running(folder) == running

    os.kill(running.pid, signal.SIGSTOP)
    try:
        hung = server("down")
    finally:
        os.kill(running.pid, signal.SIGCONT)
    assert hung.returncode == 2 and "does not answer, so nobody knows whether it has machines; --force stops it anyway" in hung.stderr
    assert server("down", "--force").returncode == 0
    assert Server.running(folder) is None


def test_a_port_in_use_names_its_owner_and_starts_nothing(server, folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused = server("up", "--port", str(port))
    assert refused.returncode == 2
    assert f"error: port {port} is in use by {psutil.Process().name()} (pid {os.getpid()}:" in refused.stderr
    assert Server.running(folder) is None


@pytest.mark.slow
def test_a_server_that_ends_at_once_shows_the_end_of_its_log(server, folder):
    """Its database cannot be opened, which only itself notices."""
    refused = server("up", "--port", str(free_port()), DSTACK_DATABASE_URL="sqlite+aiosqlite:////nowhere/at/all.db")
    assert refused.returncode == 2
    assert "error: the dstack server has ended; the end of its log:" in refused.stderr
    assert "unable to open database file" in refused.stderr
    assert Server.running(folder) is None


def test_a_server_that_does_not_answer_in_time_is_stopped_and_says_so(server, folder):
    begin = time.monotonic()
    refused = server("up", "--port", str(free_port()), "--timeout", "0")
    assert refused.returncode == 2 and "/healthcheck within 0 s" in refused.stderr
    assert Server.running(folder) is None
    assert time.monotonic() - begin < SECONDS


def test_two_at_once_start_one(server, folder):
    import fcntl

    folder.mkdir(parents=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused = server("up")
    assert refused.returncode == 2 and f"another `up` of {folder} is at work; wait for it" in refused.stderr
