"""How two ends of a connection show each other that they know the cluster's token, which neither sends.

The client's proof names the address that it called: who answers there in a pool's place cannot take it to another pool. What follows is
neither encrypted nor signed, as between Ray's processes.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path

from .frames import Closed

HELLO = b"sandbox1"
NONCE, PROOF = 16, 32  # bytes
SECONDS = 10.0


class Refused(Exception):
    """What answers does not know the token."""


def token_of(env: Mapping[str, str]) -> str:
    """The cluster's, as its processes know it. Raises ValueError where they know none."""
    path = Path(env.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray/auth_token")
    token = env.get("RAY_AUTH_TOKEN") or (path.read_text().strip() if path.is_file() else "")
    if not token:
        raise ValueError("the cluster has no token, RAY_AUTH_TOKEN: sandboxes would be everybody's")
    return token


def key_of(token: str) -> bytes:
    return hmac.new(token.encode(), b"flotilla sandboxes", hashlib.sha256).digest()


def proof(key: bytes, who: bytes, address: str, *nonces: bytes) -> bytes:
    return hmac.new(key, b"\n".join([who, address.encode(), *nonces]), hashlib.sha256).digest()


def connected(host: str, port: int, key: bytes) -> socket.socket:
    """A connection to the pool there, once both have shown that they know the token. Raises OSError, Closed, Refused."""
    made = socket.create_connection((host, port), timeout=SECONDS)
    try:
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        mine, address = secrets.token_bytes(NONCE), f"{host}:{port}"
        made.sendall(HELLO + mine)
        theirs = _exactly(made, NONCE)
        made.sendall(proof(key, b"client", address, mine, theirs))
        if not hmac.compare_digest(_exactly(made, PROOF), proof(key, b"pool", address, mine, theirs)):
            raise Refused(f"{address}: what answers there is no pool of this cluster")
    except BaseException:
        made.close()
        raise
    return made


async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, address: str) -> bool:
    """The pool's side, after HELLO: whether the client has shown that it knows the token."""
    theirs, mine = await reader.readexactly(NONCE), os.urandom(NONCE)
    writer.write(mine)
    if not hmac.compare_digest(await reader.readexactly(PROOF), proof(key, b"client", address, theirs, mine)):
        return False
    writer.write(proof(key, b"pool", address, theirs, mine))
    return True


def _exactly(of: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        part = of.recv(size - len(found))
        if not part:
            raise Closed("it hung up: its cluster has another token, perhaps")
        found += part
    return found
