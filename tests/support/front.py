"""A front on the dashboard's port with a Ray behind it that answers everything, for one test."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from cluster_tasks.node.identity import Front
from cluster_tasks.node.ports import free_port


def with_front(
    test: Callable[[int, list[bytes]], Awaitable[None]],
    gate: Path | None = None,
    most: int = 400,
    token: str | None = None,
    routes: Path | None = None,
) -> None:
    """Runs `test` with the port of a front, and what the Ray behind it hears; that answers each request with 200, and keeps connections."""

    async def run() -> None:
        heard: list[bytes] = []

        async def ray(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while head := await reader.readuntil(b"\r\n\r\n"):
                size = next((int(line[15:]) for line in head.splitlines() if line.lower().startswith(b"content-length:")), 0)
                heard.append(head + await reader.readexactly(size))
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
                if b"Connection: close" in head:
                    break
            writer.close()

        port = free_port()
        behind = await asyncio.start_server(ray, "127.0.0.1", 0)
        front = Front(behind.sockets[0].getsockname()[1], "lab", token, gate, most, routes)
        serving = asyncio.create_task(front.serve(port))
        try:
            await asyncio.wait_for(up(port), 60)
            await asyncio.wait_for(test(port, heard), 120)
        finally:
            serving.cancel()
            behind.close()

    asyncio.run(run())


async def up(port: int) -> None:
    while True:
        try:
            (await asyncio.open_connection("127.0.0.1", port))[1].close()
            return
        except OSError:
            await asyncio.sleep(0.01)


async def said(port: int, *requests: str) -> list[bytes]:
    """First lines of the answers to requests on one connection, until it is closed or each has one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    found = []
    for request in requests:
        writer.write(request.encode())
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            break
        size = next((int(line[15:]) for line in head.splitlines() if line.lower().startswith(b"content-length:")), 0)
        await reader.readexactly(size)
        found.append(head.splitlines()[0])
    writer.close()
    return found
