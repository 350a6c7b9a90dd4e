"""Sandboxes of Linux's namespaces: no daemon, no rights, no image needed. host/ has what runs; this speaks with it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from trainer.environments.sandboxes.host.channel import Channel
from trainer.environments.sandboxes.host.owner import KINDS, START_SECONDS, End, Failed, Owner
from trainer.environments.sandboxes.machine import MOST_FILE, Machine, require
from trainer.environments.sandboxes.relay import PROXY_PORT, PROXY_VARIABLES, Served, to_hosts
from trainer.environments.sandboxes.spec import Lost, Result, SandboxError, Snapshot, Spec

LAST_WORD_SECONDS = 1.0  # for a sandbox that has ended to have said why
FILE_SECONDS = 60.0  # of reading, writing, unpacking
ERROR_BYTES = 4096  # of what is said of a file
KILLED = (-9, 137)  # exit codes of what the kernel ended, or of a shell whose command it ended


class Home(Protocol):
    """Who makes machines that speak host/inside.py."""

    def place(self) -> str:
        """A folder for snapshots."""
        ...

    async def killed(self, machine: NamespaceMachine) -> int:
        """Processes of a sandbox that its memory limit ended so far."""
        ...

    async def create(
        self, spec: Spec, snapshot: Snapshot | None = None, connected: Mapping[int, Served] | None = None
    ) -> NamespaceMachine: ...


@dataclass
class Waiting:
    """A command that runs, and what came of it so far."""

    done: asyncio.Future[dict[str, Any]]
    on_output: Callable[[str, bytes], None] | None = None
    parts: dict[str, bytearray] = field(default_factory=lambda: {"out": bytearray(), "err": bytearray()})


class Namespaces:
    """A warden and its sandboxes. For one event loop."""

    name = "namespaces"
    advice = "no control groups are delegated to this user; systemd-run --user --scope -p Delegate=yes does, or root"

    def __init__(self) -> None:
        self.owner = Owner()
        self.names = itertools.count(1)
        self.machines: dict[str, NamespaceMachine] = {}

    def place(self) -> str:
        """For snapshots."""
        return self.owner.folder

    async def check(self) -> None:
        if sys.platform != "linux":
            raise SandboxError("namespaces are Linux's; use docker")
        (await self.create(Spec())).close()

    def unheld(self) -> list[str]:
        return [setting for kind, setting in KINDS.items() if kind not in self.owner.limits]

    async def create(self, spec: Spec, snapshot: Snapshot | None = None, connected: Mapping[int, Served] | None = None) -> NamespaceMachine:
        """Raises SandboxError."""
        require(spec, snapshot, self.name)
        name = f"{next(self.names)}"
        try:
            end = await self.owner.create(name, asked(spec), snapshot.path if snapshot else None, lambda end: self._ended(name, end))
        except Failed as error:
            raise SandboxError(str(error)) from None
        machine = self.machines[name] = NamespaceMachine(self, name, spec, end, connected or {})
        await machine.begun()
        return machine

    async def killed(self, machine: NamespaceMachine) -> int:
        return await self.owner.killed(machine.name)

    def close(self) -> None:
        """End all sandboxes."""
        for machine in list(self.machines.values()):
            machine.close()
        self.owner.close()

    def _ended(self, name: str, end: End) -> None:
        if machine := self.machines.pop(name, None):
            if end.why:
                machine.lost(end.why, Lost if end.lost else SandboxError)
            else:  # its own last word may still be on its way
                asyncio.get_running_loop().call_later(LAST_WORD_SECONDS, machine.lost, "")


def asked(spec: Spec) -> dict[str, Any]:
    """As host/owner.py reads it."""
    env = {**(PROXY_VARIABLES if spec.network else {}), **spec.variables}
    ports = [*([PROXY_PORT] if spec.network else []), *spec.ports]
    known = {name: getattr(spec, name) for name in ("image", "workdir", "cpu", "memory_mb", "processes", "disk_mb", "files")}
    return {**known, "folders": dict(spec.folders), "env": env, "ports": ports}


class NamespaceMachine(Machine):
    provider = "namespaces"

    def __init__(self, owner: Home, name: str, spec: Spec, end: socket.socket, connected: Mapping[int, Served]):
        self.owner, self.name, self.spec = owner, name, spec
        self.connected = {**connected, **({PROXY_PORT: to_hosts(spec.network)} if spec.network else {})}
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ready.add_done_callback(lambda future: future.cancelled() or future.exception())  # nobody may wait for it any more
        self.waiting: dict[int, Waiting] = {}
        self.names = itertools.count(1)
        self.why, self.kills, self.error = "", 0, SandboxError
        self.channel = Channel(end, self._heard, self.cut_off)

    async def begun(self) -> None:
        """Waits until commands can be run. Raises SandboxError."""
        try:
            async with asyncio.timeout(START_SECONDS):
                await self.ready
        except TimeoutError:
            self.close()
            raise SandboxError(f"the sandbox did not start within {START_SECONDS:g} s") from None
        except BaseException:
            self.close()
            raise

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | bytes = b"",
        output: int | None = None,
        session: str = "",
        on_output: Callable[[str, bytes], None] | None = None,
    ) -> Result:
        argv = [command] if isinstance(command, str) else ['exec "$@"', *command]
        request = {"do": "exec", "argv": argv, "session": session, "seconds": timeout or self.spec.timeout}
        request |= {"most": self.spec.output if output is None else output, "cwd": cwd or "", "env": dict(env or {})}
        body = stdin.encode() if isinstance(stdin, str) else stdin
        done, out, err = await self.ask(request, body, on_output)
        killed = done["code"] in KILLED and not done["late"] and await self._out_of_memory()
        texts = out.decode(errors="replace"), (err or done.get("why", "").encode()).decode(errors="replace")
        return Result(done["code"], *texts, done.get("seconds", 0.0), done.get("late", False), done.get("left_out", 0), killed)

    async def _out_of_memory(self) -> bool:
        """Whether the limit ended a process since this was asked last."""
        before, self.kills = self.kills, await self.owner.killed(self)
        return self.kills > before

    async def read(self, path: str, most: int = MOST_FILE) -> bytes:
        return await self._file({"do": "read", "path": path, "size": most, "most": most + ERROR_BYTES})

    async def write(self, path: str, content: str | bytes, mode: int | None = None) -> None:
        body = content.encode() if isinstance(content, str) else content
        if len(body) > MOST_FILE:
            raise OSError(f"{path}: {len(body)} bytes; at most {MOST_FILE} are written at once")
        await self._file({"do": "write", "path": path, "mode": mode, "most": ERROR_BYTES}, body)

    async def unpack(self, archive: bytes, path: str) -> None:
        await self._file({"do": "unpack", "path": path, "most": ERROR_BYTES}, archive)

    async def snapshot(self) -> Snapshot:
        content = await self._file({"do": "snapshot", "most": (self.spec.disk_mb << 20) * 2})
        fd, path = tempfile.mkstemp(dir=self.owner.place(), suffix=".tar")
        os.close(fd)
        Path(path).write_bytes(content)
        return Snapshot(self.provider, self.spec.image, path, len(content))

    async def fork(self) -> NamespaceMachine:
        taken = await self.snapshot()
        try:
            return await self.owner.create(self.spec, taken, self.connected)
        finally:
            Path(taken.path).unlink(missing_ok=True)

    def close(self) -> None:
        self.why = self.why or "it was closed"
        self.channel.close()
        self._give_up()

    def lost(self, why: str, error: type[SandboxError] = SandboxError) -> None:
        if not self.why:
            self.error = error
        self.why = self.why or why or "it has ended"
        self.channel.close()
        self._give_up()

    def cut_off(self) -> None:
        """Nobody is at the other end of its channel any more."""
        if not self.why:
            self.lost("")

    def gone(self) -> SandboxError:
        return self.error(f"the sandbox is gone: {self.why}")

    def _give_up(self) -> None:
        error = self.gone()
        for each in self.waiting.values():
            if not each.done.done():
                each.done.set_exception(error)
        self.waiting.clear()
        if not self.ready.done():
            self.ready.set_exception(error)

    async def _file(self, request: dict[str, Any], body: bytes = b"") -> bytes:
        done, out, err = await self.ask({"seconds": FILE_SECONDS, **request}, body)
        if done["code"]:
            said = err.decode(errors="replace").strip() or done.get("why") or f"ended with {done['code']}"
            raise OSError(said if not done.get("late") else f"{request.get('path', request['do'])}: took more than {FILE_SECONDS:g} s")
        return out

    async def ask(self, request: dict[str, Any], body: bytes = b"", on_output: Any = None) -> tuple[dict[str, Any], bytes, bytes]:
        if self.why:
            raise self.gone()
        name, waiting = next(self.names), Waiting(asyncio.get_running_loop().create_future(), on_output)
        waiting.done.add_done_callback(lambda future: future.cancelled() or future.exception())
        self.waiting[name] = waiting
        try:
            await self.channel.send({**request, "id": name}, body)
            done = await waiting.done
        except ConnectionError:
            self.cut_off()
            raise self.gone() from None
        except asyncio.CancelledError:
            with contextlib.suppress(OSError):  # what is too long for the socket's room is sent by nobody
                await asyncio.shield(self.channel.send({"do": "kill", "id": 0, "of": name}))
            raise
        finally:
            self.waiting.pop(name, None)
        return done, bytes(waiting.parts["out"]), bytes(waiting.parts["err"])

    def _heard(self, message: dict[str, Any], body: bytes, fds: list[int]) -> None:
        if "done" in message:
            if (waiting := self.waiting.get(message["done"])) and not waiting.done.done():
                waiting.done.set_result(message)
        elif "port" in message:
            for fd in fds:
                connection = socket.socket(fileno=fd)
                self.connected.get(message["port"], socket.socket.close)(connection)
        elif "ready" in message:
            if not self.ready.done():
                self.ready.set_result(None)
        elif "failed" in message:
            self.lost(f"it did not start: {message['failed']}")
        else:
            [stream] = message.keys() & {"out", "err"}
            if waiting := self.waiting.get(message[stream]):
                waiting.parts[stream] += body
                if waiting.on_output:
                    waiting.on_output(f"std{stream}", body)
