"""Messages over a stream socket: a line of JSON with its length, and bytes after it. File descriptors go with the first byte."""

from __future__ import annotations

import array
import json
import socket
import struct
from collections.abc import Sequence
from typing import Any

HEAD = struct.Struct("!II")  # bytes of the JSON, bytes after it
MOST_HEADER = 4 << 20
MOST_BODY = 1 << 30
MOST_FDS = 64

Message = dict[str, Any]


class Closed(Exception):
    """The other end is gone."""


def packed(message: Message, body: bytes = b"") -> bytes:
    text = json.dumps(message).encode()
    return HEAD.pack(len(text), len(body)) + text + body


def sizes(head: bytes) -> tuple[int, int]:
    """Raises ValueError for a head that no sender of ours writes."""
    header, body = HEAD.unpack(head)
    if header > MOST_HEADER or body > MOST_BODY:
        raise ValueError(f"a message of {header} + {body} bytes; at most {MOST_HEADER} + {MOST_BODY}")
    return header, body


def send(to: socket.socket, message: Message, body: bytes = b"", fds: Sequence[int] = ()) -> None:
    """Raises Closed."""
    data = memoryview(packed(message, body))
    try:
        if fds:
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
            sent = to.sendmsg([data[:1]], ancillary)
            data = data[sent:]
        to.sendall(data)
    except (BrokenPipeError, ConnectionResetError) as error:
        raise Closed from error


def receive(of: socket.socket) -> tuple[Message, bytes, list[int]]:
    """Waits for a whole message. Raises Closed."""
    first, fds = receive_fds(of)
    header, body = sizes(first + _exactly(of, HEAD.size - 1))
    return json.loads(_exactly(of, header)), _exactly(of, body), fds


def receive_fds(of: socket.socket) -> tuple[bytes, list[int]]:
    """One byte and the descriptors that came with it. Raises Closed."""
    fds = array.array("i")
    try:
        data, ancillary, _, _ = of.recvmsg(1, socket.CMSG_SPACE(MOST_FDS * fds.itemsize), socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError as error:
        raise Closed from error
    for level, kind, value in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(value[: len(value) - len(value) % fds.itemsize])
    if not data:
        raise Closed
    return data, list(fds)


def _exactly(of: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        try:
            part = of.recv(min(size - len(found), 1 << 20))
        except ConnectionResetError as error:
            raise Closed from error
        if not part:
            raise Closed
        found += part
    return bytes(found)
