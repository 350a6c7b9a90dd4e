"""The sandboxes of a process that plays episodes: one for each episode that asks for it, made when it first does."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.configs.sandbox import SandboxConfig
from trainer.environments.sandboxes.images import Dockerfile, Image, built
from trainer.environments.sandboxes.machine import Machine
from trainer.environments.sandboxes.pools import Line, queued
from trainer.environments.sandboxes.providers import BUILDERS, Provider, chosen
from trainer.environments.sandboxes.relay import Served
from trainer.environments.sandboxes.spec import Result, SandboxError, Snapshot, Spec, Unavailable
from trainer.errors import ConfigError


def spec_of(config: SandboxConfig, row: Mapping[str, Any]) -> Spec:
    """Raises SandboxError for an image that names a column which the row does not have."""
    try:
        image = config.image.format_map(row)
    except (KeyError, ValueError, IndexError) as error:
        raise SandboxError(f"environment.sandbox.image={config.image!r}: the row has no column {error}; it has {', '.join(row)}") from None
    names = {field.name for field in dataclasses.fields(Spec)} & set(SandboxConfig.model_fields)
    given = {name: getattr(config, name) for name in names}
    return Spec(**{**given, "image": image, "network": tuple(config.network), "output": config.output_kb << 10})


def check(config: SandboxConfig, row: Mapping[str, Any]) -> None:
    """Makes one on this machine, and ends it. Raises ConfigError."""

    async def once() -> None:
        made = Sandboxes(config)
        try:
            if config.build:  # of which no image may be there yet
                await made.builder()
            machine = None if config.build and not config.image else await made.create(spec_of(config, row))
            if machine and (await machine.exec("true")).code:
                raise SandboxError(f"environment.sandbox.image={config.image!r}: has no shell that runs, /bin/sh")
        finally:
            made.close()

    try:
        asyncio.run(once())
    except SandboxError as error:
        text = str(error)
        raise ConfigError(text if text.startswith("environment.") else f"environment.sandbox: {text}") from None


class Sandboxes:
    """Of one process. The provider starts with the first sandbox."""

    def __init__(self, config: SandboxConfig):
        self.config = config
        self.provider: Provider | None = None
        self.images: dict[Path, Image] = {}  # by their Dockerfiles
        self.turn: asyncio.Lock | None = None  # made by the event loop that uses it

    def of_episode(self, row: Mapping[str, Any], metrics: Counter[str]) -> EpisodeSandbox:
        return EpisodeSandbox(self, row, metrics)

    async def create(self, spec: Spec, snapshot: Snapshot | None = None, connected: Mapping[int, Served] | None = None) -> Machine:
        """Raises SandboxError."""
        return await (await self._provider()).create(spec, snapshot, connected)

    async def _provider(self) -> Provider:
        self.turn = self.turn or asyncio.Lock()
        async with self.turn:
            if self.provider is None:
                config = self.config
                name, building = config.provider or "auto", config.build is not None
                self.provider = await chosen(name, strict=config.strict, wait=config.wait, building=building)
            return self.provider

    async def builder(self, task: str = "a task") -> str:
        """The engine that builds its Dockerfile. Raises Unavailable."""
        name = (await self._provider()).name
        if name not in BUILDERS:
            fix = f"set environment.sandbox.provider to {' or '.join(BUILDERS)}, or leave it out"
            raise Unavailable(f"environment.sandbox.build={self.config.build}: {name} does not build the Dockerfile of {task}; {fix}")
        return name

    async def image(self, given: Dockerfile) -> Image | None:
        """Built of it, where the settings ask for that. Raises SandboxError."""
        if self.config.build is None:
            return None
        engine = await self.builder(given.task)
        if given.file not in self.images:
            with Line(queued.get()) as line:
                line.enter()  # others play meanwhile, and its time is not the episode's
                self.images[given.file] = await built(engine, given, self.config.build)
        return self.images[given.file]

    def close(self) -> None:
        if self.provider:
            self.provider.close()


@dataclass(frozen=True)
class Step:
    """What was asked of a sandbox, and a digest of what came of it: the same twice where a command is deterministic."""

    asked: str
    digest: str


class EpisodeSandbox:
    """`policy.sandbox`: a Machine that is made when it is first used, and whose commands are counted and recorded."""

    def __init__(self, sandboxes: Sandboxes, row: Mapping[str, Any], metrics: Counter[str]):
        self.sandboxes, self.row, self.metrics = sandboxes, row, metrics
        self.machine: Machine | None = None
        self.machines: list[Machine] = []  # all that are to be closed
        self.steps: list[Step] = []
        self.seen = 0  # of these
        self.turn = asyncio.Lock()

    async def open(self, snapshot: Snapshot | None = None, connected: Mapping[int, Served] | None = None, **changes: Any) -> Machine:
        """A fresh one in place of what was there, with these settings of Spec different; `connected`: who takes connections to ports of
        its loopback, as relay.py has them. Raises SandboxError."""
        unknown = changes.keys() - {field.name for field in dataclasses.fields(Spec)} | changes.keys() & {"ports"}
        if unknown:
            raise SandboxError(f"policy.sandbox.open: {', '.join(sorted(unknown))}: no such setting of a sandbox")
        async with self.turn:
            return await self._open(snapshot, changes, connected or {})

    async def _open(self, snapshot: Snapshot | None, changes: dict[str, Any], connected: Mapping[int, Served]) -> Machine:
        if self.machine:
            self.machine.close()
        spec = dataclasses.replace(spec_of(self.sandboxes.config, self.row), ports=tuple(connected), **changes)
        self.machine = await self.sandboxes.create(spec, snapshot, connected)
        self.machines.append(self.machine)
        return self.machine

    async def adopt(self, make: Callable[[Spec, Sandboxes], Awaitable[Machine]]) -> Machine:
        """The one that `make` returns, in place of what was there."""
        async with self.turn:
            if self.machine:
                self.machine.close()
            self.machine = await make(spec_of(self.sandboxes.config, self.row), self.sandboxes)
            self.machines.append(self.machine)
            return self.machine

    async def exec(self, command: str | Sequence[str], **options: Any) -> Result:
        """As Machine.exec."""
        result = await (await self.open_machine()).exec(command, **options)
        self.metrics["commands"] += 1
        self.metrics["commands_timed_out"] += result.timed_out
        self.metrics["commands_out_of_memory"] += result.out_of_memory
        self._record({"exec": command, "stdin": _text(options.get("stdin", ""))}, [result.code, result.stdout, result.stderr])
        return result

    async def read(self, path: str, **options: Any) -> bytes:
        content = await (await self.open_machine()).read(path, **options)
        self._record({"read": path}, _text(content))
        return content

    async def text(self, path: str) -> str:
        return (await self.read(path)).decode(errors="replace")

    async def write(self, path: str, content: str | bytes, mode: int | None = None) -> None:
        await (await self.open_machine()).write(path, content, mode)
        self._record({"write": path}, _text(content))

    async def write_all(self, files: Mapping[str, str | bytes], path: str | None = None) -> None:
        """Contents by paths below a folder, by default the working directory that commands begin in."""
        machine = await self.open_machine()
        await machine.write_all(files, path or machine.spec.workdir)
        self._record({"write": sorted(files)}, {name: _text(content) for name, content in files.items()})

    async def upload(self, local: str | Path, path: str) -> None:
        """A file or a folder of the node."""
        await (await self.open_machine()).upload(local, path)
        self._record({"upload": path}, "")

    async def snapshot(self) -> Snapshot:
        return await (await self.open_machine()).snapshot()

    async def fork(self) -> Machine:
        """It ends with the episode."""
        other = await (await self.open_machine()).fork()
        self.machines.append(other)
        return other

    def close(self) -> None:
        for machine in self.machines:
            machine.close()
        self.machines, self.machine = [], None

    async def open_machine(self) -> Machine:
        """The one that there is, or a fresh one."""
        async with self.turn:
            return self.machine or await self._open(None, {}, {})

    def since_last(self) -> list[list[str]]:
        """What was done since this was asked last."""
        new, self.seen = self.steps[self.seen :], len(self.steps)
        return [[step.asked, step.digest] for step in new]

    def _record(self, asked: dict[str, Any], came: Any) -> None:
        digest = hashlib.sha256(json.dumps(came).encode()).hexdigest()[:16]
        self.steps.append(Step(json.dumps(asked)[:500], digest))


def _text(content: str | bytes) -> str:
    return content if isinstance(content, str) else content.decode("latin-1")
