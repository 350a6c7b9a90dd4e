"""What goes into and comes out of the client of an engine of containers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

PIECE = 1 << 16


class Kept:
    """The first bytes of what comes."""

    def __init__(self, most: int):
        self.room, self.left_out, self.data = most, 0, bytearray()

    def add(self, data: bytes) -> bytes:
        taken = data[: self.room]
        self.room -= len(taken)
        self.left_out += len(data) - len(taken)
        self.data += taken
        return taken


class Part:
    """Of one stream, beside another that fills the same room."""

    def __init__(self, kept: Kept, stream: str, on_output: Callable[[str, bytes], None] | None):
        self.kept, self.stream, self.on_output, self.data = kept, stream, on_output, bytearray()

    def add(self, data: bytes) -> bytes:
        taken = self.kept.add(data)
        self.data += taken
        if taken and self.on_output:
            self.on_output(self.stream, taken)
        return taken


async def take(stream: asyncio.StreamReader | None, kept: Kept | Part) -> None:
    while stream and (data := await stream.read(PIECE)):
        kept.add(data)


async def feed(process: asyncio.subprocess.Process, data: bytes) -> None:
    assert process.stdin
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has ended, or reads no more
        process.stdin.write(data)
        await process.stdin.drain()
        process.stdin.close()


async def ended(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def last_line(text: bytes | bytearray) -> str:
    """Of what an engine said, less Docker's advice to read its help."""
    lines = [line for line in text.decode(errors="replace").splitlines() if line.strip() and "--help" not in line]
    return (lines or [""])[-1]
