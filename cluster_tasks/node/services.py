"""Commands that run beside Ray on this node from before the first job: a retriever, a sandbox pool, a reward model's server.

Each has its log in a file, is started again when it ends, and with a port it is waited for: the head lets no job in before every
one answers, on every node that has it. Jobs find them by the environment, `FLOTILLA_SERVICE_<NAME>`.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from . import queue_service, run_page, sandbox_status
from .errors import NOT_READY, Failure
from .monitoring.programs import services as of_monitoring
from .ports import port_answers
from .ray import spawn
from .service import Service, environment
from .settings import Settings
from .waiting import pause, wait_until

ANSWER_SECONDS = 3  # for one health check
EVERY_SECONDS = 1.0  # between two looks at services that are not ready
BACKOFF_SECONDS = (1, 2, 5, 10, 30, 60)  # before each start after the first
STEADY_SECONDS = 60  # what has run for longer starts at the first of these again
STOP_SECONDS = 10  # between SIGTERM and SIGKILL
LAST_LINES = 5  # of its log, shown when it has ended
TAIL_BYTES = 4096  # of it, in which these are looked for
LOG_BYTES, KEPT_BYTES = 2**26, 2**24  # of a log, after which its end is moved to NAME.log.1, and of that
FREED_SECONDS = 10  # for a port that a service of an earlier start held

log = logging.getLogger(__name__)


@dataclass
class Running:
    """A service on this node."""

    service: Service
    output: Path
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    failures: int = 0  # in a row
    again: float = 0.0  # when it is started again

    def start(self, env: dict[str, str]) -> None:
        with self.output.open("ab") as output:
            self.process = spawn(["/bin/bash", "-c", self.service.command], env, output)
        self.started = time.monotonic()

    def poll(self, env: dict[str, str]) -> None:
        """Starts it again when it has ended, later each time."""
        self.rotate()
        now = time.monotonic()
        if self.process is None:
            if now >= self.again:
                self.start(env)
        elif (code := self.process.poll()) is not None:
            self.failures = 0 if now - self.started > STEADY_SECONDS else self.failures
            wait = BACKOFF_SECONDS[min(self.failures, len(BACKOFF_SECONDS) - 1)]
            self.failures, self.again, self.process = self.failures + 1, now + wait, None
            log.error(
                "service %s has ended with code %d, again in %d s; its log is %s\n%s",
                self.service.name,
                code,
                wait,
                self.output,
                self.tail(),
            )

    def tail(self) -> str:
        lines = last(self.output, TAIL_BYTES).decode(errors="replace").splitlines()[-LAST_LINES:]
        return "\n".join(f"  {line}" for line in lines)

    def rotate(self) -> None:
        """Moves the end of a long log aside. The file stays the one that the command writes to, at its end."""
        if self.output.exists() and self.output.stat().st_size > LOG_BYTES:
            self.output.with_suffix(".log.1").write_bytes(last(self.output, KEPT_BYTES))
            os.truncate(self.output, 0)

    def stop(self) -> None:
        if self.process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_SECONDS)
                return


@dataclass
class Services:
    """All of this node; and on the head, whether those of all nodes are ready."""

    settings: Settings
    running: list[Running] = field(default_factory=list)

    def poll(self) -> None:
        for each in self.running:
            each.poll(self._env())

    def wait_until_ready(self) -> None:
        """Of every node. Raises Failure, which names service, node and what it answered."""
        start = time.monotonic()
        for service in self.settings.services:
            if not service.port:
                continue
            waiting = service.on_addresses(self.settings.addresses)

            def missing(service: Service = service, waiting: list[str] = waiting) -> str | None:
                self.poll()
                reasons = {address: why for address in waiting if (why := self._unready(service, address))}
                waiting[:] = reasons
                if not waiting:
                    return None
                self.settings.gate.write_text(f"waiting for service {service.name} on {', '.join(waiting)}")
                more = f" and {len(waiting) - 1} more" if len(waiting) > 1 else ""
                return f"service {service.name} on {waiting[0]}{more}: {reasons[waiting[0]]}"

            say = lambda line: log.info("waiting for %s", line)  # noqa: E731
            if line := wait_until(missing, start + service.timeout, say, sleep=pause, every=EVERY_SECONDS, repeat=10):
                raise Failure(NOT_READY, f"{line}: not ready within {service.timeout} s; that node's log of the agent names its output")
            log.info(
                "service %s is ready on %d nodes after %.1f s",
                service.name,
                len(service.on_addresses(self.settings.addresses)),
                time.monotonic() - start,
            )
        self.settings.gate.unlink(missing_ok=True)

    def _unready(self, service: Service, address: str) -> str | None:
        """As `unready`; where it is this node's, what answers has to be the process that was started."""
        own = next((each for each in self.running if each.service is service and address == self._address), None)
        if own and (own.process is None or own.process.poll() is not None):
            return "its process has ended"
        if own and time.monotonic() - own.started < EVERY_SECONDS:
            return "its process has just started"
        return unready(service, address)

    @property
    def _address(self) -> str:
        return self.settings.addresses[self.settings.rank]

    def check_ports(self) -> None:
        """Raises Failure where something else answers on the port of a service of this node: jobs would talk to that."""
        for each in self.running:
            port, deadline = each.service.port, time.monotonic() + FREED_SECONDS
            while port and port_answers(self._address, port):
                if time.monotonic() > deadline:
                    key = each.service.setting or f"flotilla:task.services.{each.service.name}.port"
                    raise Failure(2, f"{key}: {port} is in use on this node, {self._address}, by another program; choose another")
                pause(0.2)

    def _env(self) -> dict[str, str]:
        own = {"FLOTILLA_NODE_IP": self._address, "PYTHONUNBUFFERED": "1"}
        return {**os.environ, **own, **environment(self.settings.services, self.settings.rank, self.settings.addresses)}


def last(file: Path, size: int) -> bytes:
    """The end of a file: it may be far larger than memory."""
    with file.open("rb") as stream:
        stream.seek(max(0, os.fstat(stream.fileno()).st_size - size))
        return stream.read(size)


@contextlib.contextmanager
def services_of(settings: Settings) -> Iterator[Services]:
    """Runs this node's inside the `with`."""
    own = [service for service in settings.services if service.on(settings.rank)]
    parent, name = settings.place.parent, settings.place.name
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    place = settings.place = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=parent))  # a name that nobody can have prepared
    if settings.rank == 0:
        settings.routes.mkdir(mode=0o700)
        own += [
            *of_monitoring(settings),
            *run_page.services(settings),
            *queue_service.services(settings),
            *sandbox_status.services(settings),
        ]
    if settings.rank == 0 and any(service.port for service in settings.services):
        settings.gate.write_text("the nodes are not complete")
    found = Services(settings, [Running(service, place / f"{service.name}.log") for service in own])
    try:
        found.check_ports()
        for each in found.running:
            log.info("service %s: %s, its log is %s", each.service.name, each.service.command, each.output)
            each.start(found._env())
        yield found
    finally:
        for each in found.running:
            each.stop()
        shutil.rmtree(place, ignore_errors=True)


def unready(service: Service, address: str) -> str | None:
    """Why it is not ready on that node; None when it is."""
    assert service.port
    connection = http.client.HTTPConnection(address, service.port, timeout=ANSWER_SECONDS)
    with contextlib.closing(connection):
        try:
            connection.connect()
            if service.health is None:
                return None
            connection.request("GET", service.health)
            status = connection.getresponse().status
        except (OSError, http.client.HTTPException) as error:
            return f"port {service.port}: {error}"
    return None if 200 <= status < 300 else f"{service.health} answers {status}"
