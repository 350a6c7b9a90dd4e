"""The head of a request, or of an answer: its lines, the empty one too. What identity.py asks of it."""

from __future__ import annotations

import hashlib
import hmac
import json
import posixpath
import re
from collections.abc import Iterator
from urllib.parse import unquote, urlsplit

SHOWN = (b"authorization", b"x-ray-authorization")  # headers in which Ray takes the token
UNBOUNDED = {b"transfer-encoding", b"expect", b"upgrade"}


def headers(head: list[bytes], wanted: bytes) -> Iterator[bytes]:
    """Values of a request's header, however its name is written."""
    for line in head[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == wanted:
            yield value.strip()


def has_digest(head: list[bytes], digest: str) -> bool:
    """Whether a request shows the token that has this SHA-256, in hexadecimal digits."""
    shown = (value.removeprefix(b"Bearer ") for value in headers(head, b"authorization") if value.startswith(b"Bearer "))
    return any(hmac.compare_digest(hashlib.sha256(value).hexdigest(), digest) for value in shown)


def secret(line: bytes) -> bool:
    """Whether a line of a request's head may hold the token."""
    return line.partition(b":")[0].strip().lower() in (*SHOWN, b"cookie")


def plain_path(target: str) -> str:
    """The path of a request in one spelling, however it was written: `//api/%6aobs/?x` is /api/jobs."""
    path = target.partition("?")[0].partition("#")[0] if target.startswith("/") else urlsplit(target).path
    return posixpath.normpath(re.sub("/+", "/", unquote(path)))


def alone(head: list[bytes]) -> bytes:
    """The head of a request after which Ray closes the connection: another one on it would not be looked at."""
    kept = [line for line in head[:-1] if line.split(b":")[0].strip().lower() not in (b"connection", b"keep-alive", b"upgrade")]
    return b"".join([*kept, b"Connection: close\r\n", head[-1]])


def body(head: list[bytes]) -> int:
    """Bytes behind the head. Raises ValueError where it does not say one number."""
    sizes = [*headers(head, b"content-length")]
    if [*headers(head, b"transfer-encoding")] or len(sizes) > 1 or not all(size.isdigit() for size in sizes):
        raise ValueError("a body of a length that is not said")
    return int(sizes[0]) if sizes else 0


def bounded(head: list[bytes]) -> bool:
    """Whether it says where its request ends, and lets another one follow."""
    names = {line.partition(b":")[0].strip().lower() for line in head}
    closes = any(b"close" in value.lower() for value in headers(head, b"connection"))
    return head[0].startswith((b"GET ", b"POST ")) and head[0].rstrip().endswith(b"/1.1") and not (closes or names & UNBOUNDED)


def response(status: str, content: dict[str, str | None] | dict[str, str]) -> bytes:
    body = json.dumps(content).encode()
    return f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
