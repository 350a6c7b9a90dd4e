"""An owner's end of a socket that speaks frames.py, on an event loop."""

from __future__ import annotations

import array
import asyncio
import contextlib
import json
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from . import frames

PIECE = 1 << 18


class Channel:
    """`heard(message, body, fds)` is called for each message, `lost()` once the other end is gone."""

    def __init__(self, end: socket.socket, heard: Callable[[dict[str, Any], bytes, list[int]], None], lost: Callable[[], None]):
        self.socket, self.heard, self.lost = end, heard, lost
        self.loop = asyncio.get_running_loop()
        self.buffer, self.fds = bytearray(), deque[int]()
        self.turn, self.held = asyncio.Lock(), False
        self.sending: asyncio.Future[None] | None = None
        end.setblocking(False)
        self.loop.add_reader(end.fileno(), self._readable)

    async def send(self, message: dict[str, Any], body: bytes = b"", fds: Sequence[int] = ()) -> None:
        """Raises ConnectionError where nobody listens."""
        async with self.turn:
            data = frames.packed(message, body)
            if self.socket.fileno() < 0:
                raise ConnectionResetError("closed")
            self.sending = asyncio.ensure_future(self._send(data, fds))  # `close` ends it: the loop would wait on for a closed socket
            try:
                await self.sending
            except (OSError, asyncio.CancelledError):
                if self.socket.fileno() < 0:
                    raise ConnectionResetError("closed") from None
                raise
            finally:
                self.sending.cancel()
                self.sending = None

    async def _send(self, data: bytes, fds: Sequence[int]) -> None:
        if fds:
            data = data[await self._send_fds(data[:1], fds) :]
        await self.loop.sock_sendall(self.socket, data)

    async def _send_fds(self, first: bytes, fds: Sequence[int]) -> int:
        """Once there is room: descriptors go with a byte."""
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        while True:
            try:
                return self.socket.sendmsg([first], ancillary)
            except BlockingIOError:
                room: asyncio.Future[None] = self.loop.create_future()
                number = self.socket.fileno()
                self.loop.add_writer(number, _set, room)
                try:
                    await room
                finally:
                    self.loop.remove_writer(number)

    def hold(self, held: bool) -> None:
        """Read nothing more for as long as it is held."""
        if self.socket.fileno() >= 0 and held != self.held:
            self.held = held
            self.loop.remove_reader(self.socket.fileno()) if held else self.loop.add_reader(self.socket.fileno(), self._readable)

    def close(self) -> None:
        if self.socket.fileno() >= 0:
            self.loop.remove_reader(self.socket.fileno())
            self.loop.remove_writer(self.socket.fileno())
            self.socket.close()
        if self.sending:
            self.sending.cancel()
        while self.fds:
            os.close(self.fds.popleft())

    def _readable(self) -> None:
        room = socket.CMSG_SPACE(frames.MOST_FDS * 4)
        try:
            data, ancillary, _, _ = self.socket.recvmsg(PIECE, room, socket.MSG_CMSG_CLOEXEC)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data, ancillary = b"", []
        for level, kind, value in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self.fds.extend(array.array("i", value[: len(value) - len(value) % 4]))
        if not data:
            self.close()
            self.lost()
            return
        self.buffer += data
        while len(self.buffer) >= frames.HEAD.size:
            header, body = frames.sizes(bytes(self.buffer[: frames.HEAD.size]))
            end = frames.HEAD.size + header + body
            if len(self.buffer) < end:
                return
            text = bytes(self.buffer[frames.HEAD.size : frames.HEAD.size + header])
            content = bytes(self.buffer[frames.HEAD.size + header : end])
            del self.buffer[:end]
            message = json.loads(text)
            with contextlib.ExitStack() as unused:
                fds = [self.fds.popleft()] if "port" in message and self.fds else []
                for fd in fds:
                    unused.callback(os.close, fd)
                self.heard(message, content, [os.dup(fd) for fd in fds])


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
