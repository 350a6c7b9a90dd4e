"""What connections from a sandbox's loopback lead to: one address of the node, or hosts of a list by a proxy. Nothing else does."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence
from urllib.parse import urlsplit

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Served = Callable[[socket.socket], None]
MOST_CONNECTIONS = 128  # of one sandbox at a time; others are closed
HEAD_SECONDS = 20.0  # for the head of a request to the proxy
CONNECT_SECONDS = 20.0
MOST_HEAD = 16 << 10
PIECE = 1 << 16
PROXY_PORT = 3128
PROXY = f"http://127.0.0.1:{PROXY_PORT}"
PROXY_VARIABLES = {name: PROXY for word in ("http_proxy", "https_proxy") for name in (word, word.upper())}
PROXY_VARIABLES |= {"no_proxy": "127.0.0.1,localhost", "NO_PROXY": "127.0.0.1,localhost"}


def to_address(host: str, port: int) -> Served:
    """All connections lead there."""

    async def lead(mine: Streams) -> None:
        await _join(mine, await asyncio.wait_for(asyncio.open_connection(host, port), CONNECT_SECONDS))

    return _serving(lead)


def to_hosts(allowed: Sequence[str]) -> Served:
    """An HTTP proxy, for CONNECT and plain requests: `name`, ports 80 and 443; `*.name`, all below it; `name:port`, that port alone."""

    async def lead(mine: Streams) -> None:
        reader, writer = mine
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), HEAD_SECONDS)
        try:
            method, target, _ = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
            parts = urlsplit(f"//{target}" if method == "CONNECT" else target)
            host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            return await _refuse(writer, "400 Bad Request", "no request of a proxy's client")
        if not may(allowed, host, port):
            return await _refuse(writer, "403 Forbidden", f"{host}:{port}: not in environment.sandbox.network")
        try:
            theirs = await asyncio.wait_for(_open(host, port), CONNECT_SECONDS)
        except (OSError, TimeoutError) as error:
            return await _refuse(writer, "502 Bad Gateway", f"{host}:{port}: {error}")
        if method == "CONNECT":
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        else:
            path = parts._replace(scheme="", netloc="").geturl() or "/"
            lines = [line for line in head.split(b"\r\n")[1:-2] if not line.lower().startswith((b"proxy-", b"connection:"))]
            theirs[1].write(b"\r\n".join([f"{method} {path} HTTP/1.1".encode("latin-1"), *lines, b"Connection: close", b"", b""]))
        await _join(mine, theirs)

    return _serving(lead)


def may(allowed: Sequence[str], host: str, port: int) -> bool:
    for rule in allowed:
        name, _, number = rule.partition(":")
        fits = host.lower().endswith(name[1:].lower()) if name.startswith("*.") else host.lower() == name.lower()
        if fits and (port == int(number) if number else port in (80, 443)):
            return True
    return False


async def _open(host: str, port: int) -> Streams:
    """Raises OSError. A name that leads to this machine is no host of the network; who wants that writes its address."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    address = f"{found[0][4][0]}"
    if ipaddress.ip_address(address).is_loopback and host not in (address, "localhost"):
        raise OSError(f"leads to {address}")
    return await asyncio.open_connection(address, port)


def _serving(lead: Callable[[Streams], Awaitable[None]]) -> Served:
    tasks: set[asyncio.Task[None]] = set()

    async def serve(connection: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=connection, limit=MOST_HEAD)
        try:
            with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                await lead((reader, writer))
        finally:
            writer.close()

    def begin(connection: socket.socket) -> None:
        if len(tasks) >= MOST_CONNECTIONS:
            connection.close()
            return
        task = asyncio.get_running_loop().create_task(serve(connection))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    return begin


async def _refuse(writer: asyncio.StreamWriter, status: str, why: str) -> None:
    writer.write(
        f"HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {len(why) + 1}\r\nConnection: close\r\n\r\n{why}\n".encode()
    )
    await writer.drain()


async def _join(mine: Streams, theirs: Streams) -> None:
    try:
        await asyncio.gather(_carry(mine[0], theirs[1]), _carry(theirs[0], mine[1]))
    finally:
        theirs[1].close()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(PIECE):
            writer.write(data)
            await writer.drain()
    finally:
        with contextlib.suppress(OSError):
            writer.write_eof()
