"""Images that Docker or Podman build of a task's Dockerfile: once on a node, for all episodes and runs after that."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from trainer.environments.sandboxes.spec import SandboxError
from trainer.environments.sandboxes.streams import ended, last_line

LOOK_SECONDS = 60.0  # for an engine to say whether it has an image
END_SECONDS = 10.0  # for a build to end when it is asked to
SAY_SECONDS = 30.0  # between two lines about a build
LOCK_SECONDS = 0.5  # between two attempts to be the one that builds
KEPT = 1 << 14  # bytes of what a build said last
NETWORKS = {"offline": "none", "online": "default"}


@dataclass(frozen=True)
class Dockerfile:
    file: Path
    context: Path  # the folder where COPY takes files from
    task: str  # for people
    seconds: float  # in which it is built


@dataclass(frozen=True)
class Image:
    name: str
    workdir: str  # "" where its Dockerfile names none


def digest_of(folder: Path) -> str:
    """16 hex digits over names, contents and permission to run of all files below a folder."""
    found = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder).as_posix()
        if file.is_symlink():
            found.update(f"link {name} {file.readlink()}\n".encode())
        elif file.is_file():
            content = hashlib.sha256(file.read_bytes()).hexdigest()
            found.update(f"file {name} {file.stat().st_mode & 0o100:o} {content}\n".encode())
    return found.hexdigest()[:16]


async def built(engine: str, given: Dockerfile, network: str) -> Image:
    """`engine`: docker or podman; `network`: of NETWORKS. Raises SandboxError with the last line of the build, or at its deadline."""
    tag = f"flotilla-task:{hashlib.sha256(f'{network} {given.file.name} {digest_of(given.context)}'.encode()).hexdigest()[:16]}"
    began = time.monotonic()
    try:
        async with asyncio.timeout(given.seconds):
            if found := await _there(engine, tag):
                return found
            async with _alone(given, engine, tag):
                if found := await _there(engine, tag):
                    return found
                print(f"{given.task}: {engine} builds {given.file} as {tag}", flush=True)
                await _build(engine, given, network, tag)
                print(f"{given.task}: built in {time.monotonic() - began:.0f} s", flush=True)
                if found := await _there(engine, tag):
                    return found
    except TimeoutError:
        raise SandboxError(f"{given.task}: {engine} did not build {given.file} within {given.seconds:g} s") from None
    raise SandboxError(f"{given.task}: {engine} built {given.file}, but does not have {tag}")


async def _there(engine: str, tag: str) -> Image | None:
    pipe, none = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(engine, "image", "inspect", tag, stdin=none, stdout=pipe, stderr=none)
    try:
        async with asyncio.timeout(LOOK_SECONDS):
            said, _ = await process.communicate()
    except TimeoutError:
        raise SandboxError(f"{engine} image inspect {tag} did not answer within {LOOK_SECONDS:g} s") from None
    finally:
        await ended(process)
    if process.returncode:
        return None
    [found] = json.loads(said)
    return Image(tag, (found.get("Config") or {}).get("WorkingDir") or "")


@contextlib.asynccontextmanager
async def _alone(given: Dockerfile, engine: str, tag: str) -> AsyncIterator[None]:
    """While no other process of this node builds it. Where the file system has no locks, both build, and the engine keeps one."""
    with given.file.open() as file:
        waits = False
        while not _locked(file):
            if not waits:
                print(f"{given.task}: another process has {engine} build {tag}", flush=True)
            waits = True
            await asyncio.sleep(LOCK_SECONDS)
        yield


def _locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


async def _build(engine: str, given: Dockerfile, network: str, tag: str) -> None:
    """Raises SandboxError."""
    words = ["build", f"--network={NETWORKS[network]}", "--tag", tag, "--file", str(given.file)]
    if engine == "podman" and network == "offline":
        words.append("--pull=never")  # Docker has no such flag
    pipe, stdout = asyncio.subprocess.PIPE, asyncio.subprocess.STDOUT
    process = await asyncio.create_subprocess_exec(
        engine, *words, str(given.context), stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=stdout
    )
    said = bytearray()
    telling = asyncio.create_task(_tell(given.task, lambda: last_line(said)))
    try:
        assert process.stdout
        while data := await process.stdout.read(KEPT):
            said += data
            del said[:-KEPT]
        code = await process.wait()
    finally:
        telling.cancel()
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError, TimeoutError):
                process.terminate()  # Podman has processes to end
                await asyncio.wait_for(process.wait(), END_SECONDS)
        await ended(process)
    if code:
        raise SandboxError(f"{given.task}: {engine} build: exit code {code}: {last_line(said) or 'no word why'}")


async def _tell(task: str, last: Callable[[], str]) -> None:
    while True:
        await asyncio.sleep(SAY_SECONDS)
        print(f"{task}: still building: {last()}", flush=True)
