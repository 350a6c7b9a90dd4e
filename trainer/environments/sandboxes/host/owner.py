"""A warden as the process beside it has it, on an event loop: starts it, has it make sandboxes, hears how they end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .channel import Channel

PROGRAM = Path(__file__).parent
START_SECONDS = 30.0  # for the warden, and for a sandbox
LATE = (TimeoutError, asyncio.TimeoutError)  # two until Python 3.11
ENDED = "the process that holds the sandboxes has ended"
KINDS = {"memory": "memory_mb", "pids": "processes", "cpu": "cpu"}  # what control groups hold, and the setting of each


class Failed(Exception):
    """There is no warden, or no more."""


@dataclass(frozen=True)
class End:
    """Of a sandbox."""

    why: str = ""  # nothing where its own first process has said it
    lost: bool = False  # by no fault of its own: its warden has ended
    killed: int = 0  # processes that its memory limit ended
    refused: int = 0  # processes that there was no room for


class Owner:
    """Raises Failed where this machine has no warden."""

    def __init__(self) -> None:
        self.warden: subprocess.Popen[bytes] | None = None
        self.channel: Channel | None = None
        self.limits: frozenset[str] = frozenset()  # that control groups hold
        self.root = False
        self.ended: dict[str, Callable[[End], None]] = {}  # whom to tell, by sandbox
        self.looks: dict[str, list[asyncio.Future[int]]] = {}
        self.folder = ""  # for snapshots; the warden removes it
        self.ready: asyncio.Future[None] | None = None

    async def start(self) -> None:
        ready = self.ready or self._begin()
        try:
            if not ready.done():
                await asyncio.wait_for(asyncio.shield(ready), START_SECONDS)
            ready.result()
        except LATE:
            raise Failed(f"the process that holds sandboxes did not start within {START_SECONDS:g} s") from None
        if self.channel is None:  # since it said that it is ready
            raise Failed(ENDED)

    def _begin(self) -> asyncio.Future[None]:
        mine, other = socket.socketpair()
        folder = tempfile.mkdtemp(prefix="flotilla-sandboxes-")
        command = [sys.executable, "-I", "-S", str(PROGRAM), folder]
        with other:
            try:
                self.warden = subprocess.Popen(command, stdin=other.fileno(), env={"PATH": os.defpath}, start_new_session=True)
            except OSError as error:
                mine.close()
                shutil.rmtree(folder, ignore_errors=True)
                raise Failed(f"the process that holds sandboxes cannot be started: {error}") from None
        self.folder, self.channel = folder, Channel(mine, self._heard, self._lost)
        self.ready = asyncio.get_running_loop().create_future()
        return self.ready

    async def create(self, name: str, spec: Mapping[str, Any], snapshot: str | None, ended: Callable[[End], None]) -> socket.socket:
        """The sandbox's own socket, on which it says `ready` or `failed`. `spec`: as of Spec in the trainer."""
        await self.start()
        assert self.channel is not None, "start says otherwise"
        mine, other = socket.socketpair()
        with other:
            self.ended[name] = ended
            given = {**self.given(spec), "snapshot": snapshot}
            try:
                await self.channel.send({"do": "create", "name": name, "spec": given}, fds=[other.fileno()])
            except ConnectionError:
                mine.close()
                self.ended.pop(name, None)
                raise Failed(ENDED) from None
            except BaseException:  # who asked for it wants it no more: it ends with its socket
                mine.close()
                self.ended.pop(name, None)
                raise
        return mine

    def given(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        """As inside.py and warden.py read it."""
        rlimits = {"RLIMIT_CORE": 0, "RLIMIT_NOFILE": spec["files"]}
        cpus: list[int] = []
        if "pids" not in self.limits:
            rlimits["RLIMIT_NPROC"] = spec["processes"]
        if "memory" not in self.limits:
            rlimits["RLIMIT_DATA"] = spec["memory_mb"] << 20
        if "cpu" not in self.limits:
            there = sorted(os.sched_getaffinity(0))
            cpus = sorted(random.sample(there, min(len(there), max(1, int(spec["cpu"] + 0.999)))))
        return {
            "lower": spec["image"] or None,
            "folders": [[source, path] for path, source in spec["folders"].items()],
            "workdir": spec["workdir"],
            "env": spec["env"],
            "cpu": spec["cpu"],
            "memory_mb": spec["memory_mb"] + spec["disk_mb"],  # of which the disk is a part
            "processes": spec["processes"] + 1,  # the first one is not the commands'
            "disk_mb": spec["disk_mb"],
            "rlimits": rlimits,
            "cpus": cpus,
            "pin_cpus": bool(cpus),
            "ports": [*spec["ports"]],
        }

    async def killed(self, name: str) -> int:
        """Processes of a sandbox that its memory limit ended so far."""
        if self.channel is None or "memory" not in self.limits:
            return 0
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.looks.setdefault(name, []).append(future)
        try:
            await self.channel.send({"do": "look", "name": name})
            return await asyncio.wait_for(future, START_SECONDS)
        except (ConnectionError, *LATE):
            return 0

    def close(self) -> None:
        """End all sandboxes."""
        if self.channel:
            self.channel.close()
        if self.warden:
            try:
                self.warden.wait(START_SECONDS)
            except subprocess.TimeoutExpired:
                self.warden.kill()
                self.warden.wait()
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.warden, self.channel, self.ready = None, None, None

    def _heard(self, message: dict[str, Any], body: bytes, fds: list[int]) -> None:
        if "hello" in message:
            self.limits, self.root = frozenset(message["hello"]), message["root"]
            if self.ready and not self.ready.done():
                self.ready.set_result(None)
        elif "looked" in message:
            for future in self.looks.pop(message["looked"], []):
                if not future.done():
                    future.set_result(message["killed"])
        elif tell := self.ended.pop(message["ended"], None):
            tell(End(message["why"], killed=message.get("killed", 0), refused=message.get("refused", 0)))

    def _lost(self) -> None:
        why = ENDED
        if self.ready and not self.ready.done():
            self.ready.set_exception(Failed(why))
            self.ready.exception()  # nobody may wait for it any more
        told, self.ended = self.ended, {}
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)
        if self.warden:
            self.warden.wait()
        self.warden, self.channel, self.ready = None, None, None  # the next one that is asked for starts another
        for tell in told.values():
            tell(End(why, lost=True))
        for futures in self.looks.values():
            for future in futures:
                with contextlib.suppress(asyncio.InvalidStateError):
                    future.set_result(0)
        self.looks.clear()
