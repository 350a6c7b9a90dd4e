"""A pool's answers to HTTP."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Mapping


async def answer(
    first: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: str, texts: Mapping[str, Callable[[], str]]
) -> None:
    """To a request that begins with these bytes: /health for everybody, `texts` by path for who shows the token."""
    head = (first + await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    path, *_ = head.split(" ")[1].split("?")
    shown = next((line.split(":", 1)[1].strip() for line in head.split("\r\n") if line.lower().startswith("authorization:")), "")
    status, text = "404 Not Found", ""
    if path == "/health":
        status, text = "200 OK", "ok\n"
    elif path in texts:
        allowed = hmac.compare_digest(shown.encode(), f"Bearer {token}".encode())
        status, text = ("200 OK", texts[path]()) if allowed else ("401 Unauthorized", "show the cluster's token\n")
    kind = "application/json" if text.startswith("{") else "text/plain; version=0.0.4"
    body = text.encode()
    writer.write(f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
    await writer.drain()
