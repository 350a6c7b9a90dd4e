"""How full the pools of a cluster are, for the dashboard's port on the head: `python3 host summary --socket PATH ADDRESS...`"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
from typing import Any

from . import entry
from .owner import LATE

SECONDS = 3.0  # for one pool


async def load(address: str, token: str) -> dict[str, Any]:
    """With `why` alone where it does not answer."""
    try:
        return {"node": address, **await asyncio.wait_for(_asked(address, token), SECONDS)}
    except (OSError, ValueError, asyncio.IncompleteReadError, *LATE) as error:
        return {"node": address, "why": f"{error}" or f"no answer within {SECONDS:g} s"}


async def _asked(address: str, token: str) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    try:
        writer.write(f"GET /load HTTP/1.1\r\nHost: {address}\r\nAuthorization: Bearer {token}\r\n\r\n".encode())
        head, _, body = (await reader.read(1 << 20)).partition(b"\r\n\r\n")
        while more := await reader.read(1 << 20):
            body += more
    finally:
        writer.close()
    if b" 200 " not in head.partition(b"\r\n")[0]:
        raise ValueError(f"answers {head.partition(bytes([13]))[0].decode(errors='replace')[:80]}")
    return json.loads(body)


async def serve(path: str, addresses: list[str], token: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, *LATE):
            await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), SECONDS)
            body = json.dumps({"pools": await asyncio.gather(*(load(address, token) for address in addresses))}).encode()
            head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            writer.write(head.encode() + body)
            await writer.drain()
        writer.close()

    async with await asyncio.start_unix_server(answer, path) as server:
        await server.serve_forever()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="sandbox summary", description=__doc__)
    parser.add_argument("--socket", required=True)
    parser.add_argument("addresses", nargs="+")
    known = parser.parse_args(arguments)
    try:
        token = entry.token_of(os.environ)
    except ValueError as error:
        print(f"sandbox summary: {error}", file=sys.stderr)
        return 2
    os.umask(0o077)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(known.socket)  # of one that was killed
    asyncio.run(serve(known.socket, known.addresses, token))
    return 0
