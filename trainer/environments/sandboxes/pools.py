"""Sandboxes of the cluster's pools: of the nodes whose fleet has `sandboxes` in the stack file. host/pool.py is what answers there."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from trainer.environments.sandboxes.host import entry, frames
from trainer.environments.sandboxes.host.owner import START_SECONDS
from trainer.environments.sandboxes.machine import require
from trainer.environments.sandboxes.namespaces import NamespaceMachine, asked
from trainer.environments.sandboxes.relay import Served
from trainer.environments.sandboxes.spec import Lost, SandboxError, Snapshot, Spec

# Of an episode: called with True while it waits for room, and False after that.
queued: ContextVar[Callable[[bool], None]] = ContextVar("queued", default=lambda _: None)
WHERE = "FLOTILLA_SERVICE_SANDBOXES_ALL"  # the node agent's, for jobs: addresses of all pools, with commas
BEAT_SECONDS = 2.0  # pools take an owner for dead after host/pool.py SILENCE
HEAR_SECONDS = 10.0  # for a pool to answer a beat
END_SECONDS = 1.0  # for a thread to end, unless it waits for a pool that does not answer
AGAIN_SECONDS = 1.0  # between two attempts to reach one
SLICE = 5.0  # seconds in the line of one pool, where there are others
SAY_SECONDS = 10.0  # between two lines about what is waited for
ERRORS = (OSError, frames.Closed, entry.Refused, ValueError)


def there() -> bool:
    """Whether the cluster of this process has pools."""
    return bool(os.environ.get(WHERE))


class Full(Exception):
    """There was no room within the time."""


class Line:
    """An episode's place among those that wait for room, once it has one."""

    def __init__(self, tell: Callable[[bool], None]):
        self.tell, self.waits = tell, False

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        if self.waits:
            self.tell(False)
        self.waits = False

    def enter(self) -> None:
        if not self.waits:
            self.waits = True
            self.tell(True)


class Watch(threading.Thread):
    """Beats to one pool, also while the event loop stands still, and knows how full it is."""

    def __init__(self, host: str, port: int, key: bytes, owner: str):
        super().__init__(name=f"sandboxes of {host}", daemon=True)
        self.host, self.port, self.key, self.owner = host, port, key, owner
        self.load: dict[str, Any] | None = None
        self.why = "it was not asked yet"
        self.given = 0  # asked of it since it was heard last
        self.heard, self.closing = threading.Event(), threading.Event()

    def run(self) -> None:
        while not self.closing.is_set():
            try:
                with entry.connected(self.host, self.port, self.key) as pool:
                    pool.settimeout(HEAR_SECONDS)
                    frames.send(pool, {"do": "watch", "owner": self.owner})
                    while True:
                        self.load, self.given = frames.receive(pool)[0], 0
                        self.heard.set()
                        if self.closing.wait(BEAT_SECONDS):
                            return
                        frames.send(pool, {"do": "beat"})
            except ERRORS as error:
                self.load, self.why = None, f"{error}" or "it hung up"
                self.heard.set()
                self.closing.wait(AGAIN_SECONDS)

    @property
    def fullness(self) -> float:
        assert self.load
        return (self.load["in_use"] + self.load["waiting"] + self.given) / self.load["room"]

    def line(self) -> str:
        load = self.load
        name = f"{self.host}:{self.port}"
        if load is None:
            return f"{name}: {self.why}"
        trouble = f", {load['trouble']}" if load["trouble"] else ""
        return f"{name}: {load['in_use']} of {load['room']} in use, {load['waiting']} waiting{trouble}"


class Pools:
    """For one event loop."""

    name = "pool"
    advice = "no control groups are delegated to the node agent's user there"

    def __init__(self) -> None:
        self.wait = 600.0  # seconds for room
        self.owner = secrets.token_hex(8)
        self.watches: list[Watch] = []
        self.machines: set[PoolMachine] = set()
        self.names = itertools.count(1)
        self.folder = ""  # for snapshots
        self.said = 0.0

    async def check(self) -> None:
        if not there():
            raise SandboxError("this cluster has no pools of sandboxes: set fleets[].sandboxes in its stack file")
        try:
            key = entry.key_of(entry.token_of(os.environ))
        except ValueError as error:
            raise SandboxError(str(error)) from None
        for url in os.environ[WHERE].split(","):
            parts = urlsplit(url)
            self.watches.append(Watch(parts.hostname or "", parts.port or 0, key, self.owner))
        for each in self.watches:
            each.start()
        until = time.monotonic() + START_SECONDS
        while not self.reached() and time.monotonic() < until:
            await asyncio.sleep(0.05)
        if not self.reached():
            raise SandboxError(f"no pool answers within {START_SECONDS:g} s: {self.lines()}")

    def reached(self) -> list[Watch]:
        return [each for each in self.watches if each.load is not None]

    def lines(self) -> str:
        return "; ".join(each.line() for each in self.watches)

    def unheld(self) -> list[str]:
        return sorted({setting for each in self.watches if each.load for setting in each.load["unheld"]})

    async def create(self, spec: Spec, snapshot: Snapshot | None = None, connected: Mapping[int, Served] | None = None) -> PoolMachine:
        """On the pool that is the least full, once there is room. Raises SandboxError."""
        require(spec, snapshot, self.name)
        body = await asyncio.to_thread(Path(snapshot.path).read_bytes) if snapshot else b""
        with Line(queued.get()) as line:
            return await self._create(spec, body, connected or {}, line)

    async def _create(self, spec: Spec, body: bytes, connected: Mapping[int, Served], line: Line) -> PoolMachine:
        until = time.monotonic() + self.wait
        while True:
            left = until - time.monotonic()
            reached = self.reached()
            if left <= 0:
                if not reached:
                    raise Lost(f"no pool of sandboxes answers within {self.wait:g} s (environment.sandbox.wait): {self.lines()}")
                raise SandboxError(
                    f"no room for a sandbox within {self.wait:g} s (environment.sandbox.wait): {self.lines()}; "
                    "raise fleets[].sandboxes.number, or let fewer episodes play at a time"
                )
            if not reached:
                self.say(line)
                await asyncio.sleep(min(left, 0.1))
                continue
            watch = min(reached, key=lambda each: (each.fullness, random.random()))
            watch.given += 1
            try:
                return await self._ask(watch, spec, body, connected, left if len(self.watches) == 1 else min(left, SLICE), line)
            except Full:
                self.say(line)
            except (Lost, *ERRORS) as error:
                watch.load, watch.why = None, f"{error}" or "it hung up"  # until it is heard again
                self.say(line)
                await asyncio.sleep(min(max(0.0, left), 0.2))

    async def _ask(
        self, watch: Watch, spec: Spec, body: bytes, connected: Mapping[int, Served], patience: float, line: Line
    ) -> PoolMachine:
        end = await asyncio.to_thread(entry.connected, watch.host, watch.port, watch.key)
        machine = PoolMachine(self, watch, spec, end, connected, line)
        try:
            request = {"do": "lease", "owner": self.owner, "spec": asked(spec), "patience": patience}
            await machine.channel.send(request, body)
            async with asyncio.timeout(patience + START_SECONDS + 5):
                await machine.ready
        except TimeoutError:
            machine.close()
            raise Lost(f"the pool on {watch.host}:{watch.port} did not answer") from None
        except BaseException:
            machine.close()
            raise
        return machine

    def say(self, line: Line) -> None:
        """What is waited for, from time to time."""
        line.enter()
        if time.monotonic() - self.said > SAY_SECONDS:
            self.said = time.monotonic()
            print(f"sandboxes: waiting for room: {self.lines()}", flush=True)

    def place(self) -> str:
        """For a snapshot."""
        self.folder = self.folder or tempfile.mkdtemp(prefix="flotilla-snapshots-")
        return self.folder

    async def killed(self, machine: NamespaceMachine) -> int:
        return (await machine.ask({"do": "look"}))[0]["killed"]

    def close(self) -> None:
        """End all sandboxes."""
        for machine in list(self.machines):
            machine.close()
        for each in self.watches:
            each.closing.set()
        for each in self.watches:
            each.join(END_SECONDS) if each.is_alive() else None
        if self.folder:
            for path in Path(self.folder).iterdir():
                path.unlink()
            Path(self.folder).rmdir()
            self.folder = ""


class PoolMachine(NamespaceMachine):
    provider = "pool"

    def __init__(self, home: Pools, watch: Watch, spec: Spec, end: socket.socket, connected: Mapping[int, Served], line: Line):
        self.home, self.watch, self.line = home, watch, line
        self.links: set[asyncio.Task[None]] = set()
        super().__init__(home, f"{next(home.names)}", spec, end, connected)
        home.machines.add(self)

    def close(self) -> None:
        super().close()
        self.home.machines.discard(self)

    def lost(self, why: str, error: type[SandboxError] = SandboxError) -> None:
        super().lost(why, error)
        self.home.machines.discard(self)

    def cut_off(self) -> None:
        if not self.why:
            self.lost(f"its pool on {self.watch.host}:{self.watch.port} has ended", Lost)

    def _heard(self, message: dict[str, Any], body: bytes, fds: list[int]) -> None:
        if "leased" in message:
            self.watch.load = message["load"]
            if not self.ready.done():
                self.ready.set_result(None)
        elif "line" in message:
            self.watch.load = message["line"]
            self.home.say(self.line)
        elif "full" in message:
            self.watch.load = message["full"]
            if not self.ready.done():
                self.ready.set_exception(Full())
        elif "failed" in message:
            kind = Lost if message.get("lost") else SandboxError
            if not self.ready.done():
                self.ready.set_exception(kind(f"{message['failed']} (the pool on {self.watch.host}:{self.watch.port})"))
        elif "gone" in message:
            self.lost(message["gone"], Lost if message["lost"] else SandboxError)
        elif "link" in message:
            task = asyncio.get_running_loop().create_task(self._fetch(message))
            self.links.add(task)
            task.add_done_callback(self.links.discard)
        else:
            super()._heard(message, body, fds)

    async def _fetch(self, message: dict[str, Any]) -> None:
        """One connection to a port of the sandbox's loopback."""
        with contextlib.suppress(*ERRORS):
            made = await asyncio.to_thread(entry.connected, self.watch.host, self.watch.port, self.watch.key)
            frames.send(made, {"do": "link", "lease": message["lease"], "link": message["link"]})
            made.setblocking(False)
            self.connected.get(message["port"], socket.socket.close)(made)
