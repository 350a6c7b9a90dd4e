"""The process of a dstack server that was started here: found again, waited for, stopped.

All its state is in one folder: config.yml, the database below data/, the admin's token, server.log, server.json.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import requests

from stacks.errors import UserError
from stacks.host import processes

MARKER = "FLOTILLA_DSTACK_SERVER"  # in the environment of the server, by which its process is known
SAY_SECONDS = 5  # between words about a wait
STOP_SECONDS = 60  # it finishes what it is doing; after that it is killed
KILL_SECONDS = 10
LOG_LINES = 15  # of the log that an error shows
# Only where the caller does not say otherwise. At INFO the server writes the admin's token into its log.
DEFAULTS = {
    "DSTACK_SERVER_LOG_LEVEL": "WARNING",
    "DSTACK_SERVER_LOG_FORMAT": "standard",
    "DSTACK_SERVER_CODE_UPLOAD_LIMIT": str(2**24),  # bytes of a job's files; dstack's own is 2 MiB, and the trainer has nearly as many
}


class ServerError(UserError):
    """What a person can fix; the text says how."""


@dataclass(frozen=True)
class Server:
    """A server that was started here; kept in server.json."""

    folder: str
    pid: int
    url: str
    config: str  # digest of the config.yml that it was started with

    @property
    def process(self) -> psutil.Process | None:
        """None when it has ended."""
        return processes.find(self.pid, MARKER, self.folder)

    @classmethod
    def running(cls, folder: Path) -> Server | None:
        """The server of this folder, if it lives."""
        try:
            server = cls(**json.loads((folder / "server.json").read_text()))
        except (FileNotFoundError, json.JSONDecodeError, TypeError):
            return None
        return server if server.process else None

    @classmethod
    def start(cls, folder: Path, port: int, config: str) -> Server:
        """Starts `dstack server` with the caller's environment. Raises ServerError where the port is taken."""
        if owner := port_owner(port):
            raise ServerError(f"port {port} is in use by {owner}; end that, or take another with --port")
        environment = DEFAULTS | os.environ | {MARKER: str(folder), "DSTACK_SERVER_DIR": str(folder)}
        environment |= {"DSTACK_SERVER_ADMIN_TOKEN": token(folder), "DSTACK_DO_NOT_UPDATE_DEFAULT_PROJECT": "1"}
        command = [str(Path(sys.executable).with_name("dstack")), "server", "--host", "127.0.0.1", "--port", str(port)]
        with os.fdopen(os.open(folder / "server.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as log:
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd=folder
            )
        server = cls(str(folder), process.pid, f"http://127.0.0.1:{port}", config)
        (folder / "server.json").write_text(json.dumps(asdict(server), indent=2) + "\n")
        return server

    def wait(self, seconds: float) -> None:
        """Until it answers. Raises ServerError where it ends before, or the time is over."""
        begin = said = time.monotonic()
        deadline = begin + seconds
        while not self.answers():
            if time.monotonic() - said > SAY_SECONDS:
                said = time.monotonic()
                print(f"waiting for {self.url}, {said - begin:.0f} s of {seconds:.0f}", flush=True)
            if self.process is None:
                raise ServerError(f"the dstack server has ended; the end of its log:\n{self.tail()}")
            if time.monotonic() > deadline:
                raise ServerError(f"the dstack server has not answered {self.url}/healthcheck within {seconds:.0f} s:\n{self.tail()}")
            time.sleep(0.2)

    def answers(self) -> bool:
        with requests.Session() as session:
            session.trust_env = False  # never through a proxy
            try:
                return session.get(f"{self.url}/healthcheck", timeout=5).ok
            except requests.RequestException:
                return False

    def stop(self) -> None:
        """Ends it. Raises ServerError where the kernel does not let it go."""
        if process := self.process:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except psutil.TimeoutExpired:
                process.kill()
                try:
                    process.wait(KILL_SECONDS)
                except psutil.TimeoutExpired:
                    raise ServerError(f"the dstack server, pid {self.pid}, was killed but has not ended within {KILL_SECONDS} s") from None
        (Path(self.folder) / "server.json").unlink(missing_ok=True)

    def tail(self) -> str:
        log = Path(self.folder) / "server.log"
        lines = log.read_text(errors="replace").splitlines()
        return "\n".join([f"--- {log}", *lines[-LOG_LINES:]])

    def said_of(self, word: str) -> str:
        """The last line of the log with this word in it; the end of the log where there is none."""
        lines = (Path(self.folder) / "server.log").read_text(errors="replace").splitlines()
        return next((line for line in reversed(lines) if word in line), self.tail())


def token(folder: Path) -> str:
    """The admin's token: made once, kept in a file that its owner alone can read."""
    file = folder / "token"
    if not file.exists():
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            out.write(os.environ.get("DSTACK_SERVER_ADMIN_TOKEN") or secrets.token_hex(32))
    return file.read_text().strip()


def port_owner(port: int) -> str | None:
    """Who listens on a port of the loopback address, in words; None where nobody does."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was closed a moment ago is free
        try:
            probe.bind(("127.0.0.1", port))
            return None
        except OSError:
            pass
    with contextlib.suppress(psutil.Error):  # macOS shows connections of others to root alone
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr[1:] == (port,) and connection.pid:
                process = psutil.Process(connection.pid)
                return f"{process.name()} (pid {process.pid}: {' '.join(process.cmdline())[:80]})"
    return "a process of another user"
