"""Sandboxes of Linux's namespaces: no daemon, no rights, no image needed. host/ has what runs; this speaks with it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.environments.sandboxes.channel import Channel
from trainer.environments.sandboxes.machine import MOST_FILE, Machine, require
from trainer.environments.sandboxes.relay import PROXY_PORT, PROXY_VARIABLES, Served, to_hosts
from trainer.environments.sandboxes.spec import Result, SandboxError, Snapshot, Spec

PROGRAM = Path(__file__).with_name("host")
START_SECONDS = 30.0  # for the warden, and for a sandbox
LAST_WORD_SECONDS = 1.0  # for a sandbox that has ended to have said why
FILE_SECONDS = 60.0  # of reading, writing, unpacking
ERROR_BYTES = 4096  # of what is said of a file
KILLED = (-9, 137)  # exit codes of what the kernel ended, or of a shell whose command it ended
KINDS = {"memory": "memory_mb", "pids": "processes", "cpu": "cpu"}


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
        self.warden: subprocess.Popen[bytes] | None = None
        self.channel: Channel | None = None
        self.limits: frozenset[str] = frozenset()  # that control groups hold
        self.root = False
        self.names = itertools.count(1)
        self.machines: dict[str, NamespaceMachine] = {}
        self.looks: dict[str, list[asyncio.Future[int]]] = {}
        self.folder = ""  # for snapshots
        self.ready: asyncio.Future[None] | None = None

    async def start(self) -> None:
        """Raises SandboxError where this machine has no warden."""
        if self.ready is None:
            self.ready = asyncio.get_running_loop().create_future()
            mine, other = socket.socketpair()
            self.folder = tempfile.mkdtemp(prefix="flotilla-sandboxes-")
            with other:
                command = [sys.executable, "-I", "-S", str(PROGRAM), self.folder]
                self.warden = subprocess.Popen(command, stdin=other.fileno(), env={"PATH": os.defpath}, start_new_session=True)
            self.channel = Channel(mine, self._heard, self._lost)
        async with asyncio.timeout(START_SECONDS):
            await asyncio.shield(self.ready)

    async def check(self) -> None:
        if sys.platform != "linux":
            raise SandboxError("namespaces are Linux's; use docker")
        (await self.create(Spec())).close()

    def unheld(self) -> list[str]:
        return [setting for kind, setting in KINDS.items() if kind not in self.limits]

    async def create(self, spec: Spec, snapshot: Snapshot | None = None, connected: Mapping[int, Served] | None = None) -> NamespaceMachine:
        """Raises SandboxError."""
        require(spec, snapshot, self.name)
        await self.start()
        assert self.channel is not None
        name = f"{next(self.names)}"
        mine, other = socket.socketpair()
        with other:
            machine = NamespaceMachine(self, name, spec, mine, connected or {})
            self.machines[name] = machine
            given = {**self._spec(spec), "snapshot": snapshot.path if snapshot else None}
            await self.channel.send({"do": "create", "name": name, "spec": given}, fds=[other.fileno()])
        try:
            async with asyncio.timeout(START_SECONDS):
                await machine.ready
        except TimeoutError:
            machine.close()
            raise SandboxError(f"the sandbox did not start within {START_SECONDS:g} s") from None
        except BaseException:
            machine.close()
            raise
        return machine

    def _spec(self, spec: Spec) -> dict[str, Any]:
        """As host/inside.py and host/warden.py read it."""
        rlimits = {"RLIMIT_CORE": 0, "RLIMIT_NOFILE": spec.files}
        cpus: list[int] = []
        if "pids" not in self.limits:
            rlimits["RLIMIT_NPROC"] = spec.processes
        if "memory" not in self.limits:
            rlimits["RLIMIT_DATA"] = spec.memory_mb << 20
        if "cpu" not in self.limits:
            there = sorted(os.sched_getaffinity(0))
            cpus = sorted(random.sample(there, min(len(there), max(1, int(spec.cpu + 0.999)))))
        return {
            "lower": spec.image or None,
            "folders": [[source, path] for path, source in spec.folders.items()],
            "workdir": spec.workdir,
            "env": {**(PROXY_VARIABLES if spec.network else {}), **spec.variables},
            "cpu": spec.cpu,
            "memory_mb": spec.memory_mb + spec.disk_mb,  # of which the disk is a part
            "processes": spec.processes + 1,  # the first one is not the commands'
            "disk_mb": spec.disk_mb,
            "rlimits": rlimits,
            "cpus": cpus,
            "pin_cpus": bool(cpus),
            "ports": [*([PROXY_PORT] if spec.network else []), *spec.ports],
        }

    async def killed(self, name: str) -> int:
        """Processes of a sandbox that its memory limit ended so far."""
        if self.channel is None or "memory" not in self.limits:
            return 0
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.looks.setdefault(name, []).append(future)
        try:
            await self.channel.send({"do": "look", "name": name})
            async with asyncio.timeout(START_SECONDS):
                return await future
        except (ConnectionError, TimeoutError):
            return 0

    def close(self) -> None:
        """End all sandboxes."""
        for machine in list(self.machines.values()):
            machine.close()
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
        elif machine := self.machines.pop(message["ended"], None):
            if message["why"]:
                machine.lost(message["why"])
            else:  # its own last word may still be on its way
                asyncio.get_running_loop().call_later(LAST_WORD_SECONDS, machine.lost, "")

    def _lost(self) -> None:
        why = "the process that holds the sandboxes has ended"
        if self.ready and not self.ready.done():
            self.ready.set_exception(SandboxError(why))
        for machine in list(self.machines.values()):
            machine.lost(why)
        self.machines.clear()
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)
        if self.warden:
            self.warden.wait()
        self.warden, self.channel, self.ready = None, None, None  # the next one that is asked for starts another


class NamespaceMachine(Machine):
    provider = "namespaces"

    def __init__(self, owner: Namespaces, name: str, spec: Spec, end: socket.socket, connected: Mapping[int, Served]):
        self.owner, self.name, self.spec = owner, name, spec
        self.connected = {**connected, **({PROXY_PORT: to_hosts(spec.network)} if spec.network else {})}
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ready.add_done_callback(lambda future: future.cancelled() or future.exception())  # nobody may wait for it any more
        self.waiting: dict[int, Waiting] = {}
        self.names = itertools.count(1)
        self.why, self.kills = "", 0
        self.channel = Channel(end, self._heard, lambda: None if self.why else self.lost(""))

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
        done, out, err = await self._ask(request, body, on_output)
        killed = done["code"] in KILLED and not done["late"] and await self._out_of_memory()
        texts = out.decode(errors="replace"), (err or done.get("why", "").encode()).decode(errors="replace")
        return Result(done["code"], *texts, done.get("seconds", 0.0), done.get("late", False), done.get("left_out", 0), killed)

    async def _out_of_memory(self) -> bool:
        """Whether the limit ended a process since this was asked last."""
        before, self.kills = self.kills, await self.owner.killed(self.name)
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
        fd, path = tempfile.mkstemp(dir=self.owner.folder, suffix=".tar")
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

    def lost(self, why: str) -> None:
        self.why = self.why or why or "it has ended"
        self.channel.close()
        self._give_up()

    def _give_up(self) -> None:
        error = SandboxError(f"the sandbox is gone: {self.why}")
        for each in self.waiting.values():
            if not each.done.done():
                each.done.set_exception(error)
        self.waiting.clear()
        if not self.ready.done():
            self.ready.set_exception(error)

    async def _file(self, request: dict[str, Any], body: bytes = b"") -> bytes:
        done, out, err = await self._ask({"seconds": FILE_SECONDS, **request}, body)
        if done["code"]:
            said = err.decode(errors="replace").strip() or done.get("why") or f"ended with {done['code']}"
            raise OSError(said if not done.get("late") else f"{request.get('path', request['do'])}: took more than {FILE_SECONDS:g} s")
        return out

    async def _ask(self, request: dict[str, Any], body: bytes = b"", on_output: Any = None) -> tuple[dict[str, Any], bytes, bytes]:
        if self.why:
            raise SandboxError(f"the sandbox is gone: {self.why}")
        name, waiting = next(self.names), Waiting(asyncio.get_running_loop().create_future(), on_output)
        waiting.done.add_done_callback(lambda future: future.cancelled() or future.exception())
        self.waiting[name] = waiting
        try:
            await self.channel.send({**request, "id": name}, body)
            done = await waiting.done
        except ConnectionError:
            self.lost("")
            raise SandboxError(f"the sandbox is gone: {self.why}") from None
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
