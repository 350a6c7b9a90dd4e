"""Sandboxes of this node for the jobs of its cluster: `python3 host pool`, a service of the node agent.

A connection is one of these, once its client has shown that it knows the cluster's token:
    watch   an owner's: it sends `beat`, and is told how full this node is. When it ends, or is silent, the owner's sandboxes end.
    lease   a sandbox: what is sent goes to it, what it says comes back, as with inside.py. It ends with the connection.
    link    one connection to a port of a sandbox's loopback, which the client leads where it likes.
    GET     HTTP: /health for everybody; /metrics and /load for who shows the token.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from . import entry, frames, web
from .kept import Keeper, Kept
from .meter import Meter
from .owner import KINDS, LATE, Failed
from .room import Room, read

SILENCE = 20.0  # seconds without a beat, after which an owner is taken for dead
MOST_WAIT = 3600.0  # seconds that a client may wait in line
LINK_SECONDS = 20.0  # for a client to fetch a connection
PIECE = 1 << 16
MOST_AHEAD = 4 << 20  # bytes that a slow client may let wait, after which its sandbox is not read from
STRANGERS = 1024  # connections at a time that have not shown the token
GONE = (ConnectionError, asyncio.IncompleteReadError, frames.Closed)


@dataclass
class Lease:
    name: str
    owner: str
    began: float
    writer: asyncio.StreamWriter
    kept: Kept | None = None
    links: dict[int, socket.socket] = field(default_factory=dict)
    execs: set[int] = field(default_factory=set)  # ids of commands, until the first has ended
    served: bool = False  # a command has ended
    why: str = ""

    def say(self, message: dict[str, Any], body: bytes = b"") -> None:
        if not self.writer.is_closing():
            self.writer.write(frames.packed(message, body))


class Pool:
    def __init__(self, room: Room, token: str, address: str, silence: float = SILENCE):
        self.room, self.key, self.token, self.address = room, entry.key_of(token), token, address
        self.silence, self.meter = silence, Meter()
        self.keeper = Keeper(room, self.meter)
        self.owners: dict[str, set[asyncio.Task[None]]] = {}
        self.watching: Counter[str] = Counter()  # connections of each owner
        self.leases: dict[str, Lease] = {}
        self.strangers = 0
        self.count = 0
        self.tasks: set[asyncio.Task[None]] = set()

    async def serve(self, host: str, port: int) -> None:
        await self.keeper.owner.start()  # which says what limits this node can hold
        server = await asyncio.start_server(self._connected, host, port, backlog=512)
        print(f"{self.room.number} sandboxes on {self.address}", flush=True)
        async with server:
            await asyncio.gather(server.serve_forever(), self.keeper.serve())

    def load(self) -> dict[str, Any]:
        now = self.now()
        unheld = [setting for kind, setting in KINDS.items() if kind not in self.keeper.owner.limits]
        return {**now, "memory_mb": self.room.memory_mb, "unheld": unheld, "trouble": self.keeper.trouble}

    def now(self) -> dict[str, int]:
        room = self.room
        now = {"room": room.number, "ready": len(self.keeper.warm), "to_keep": room.to_keep()}
        return now | {"in_use": len(room.taken), "waiting": len(room.line)}

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(*GONE, *LATE, ValueError, KeyError):
                if made := await self._entered(reader, writer):
                    await made
        finally:
            writer.close()

    async def _entered(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Coroutine[Any, Any, None] | None:
        """What the connection is for."""
        if self.strangers >= STRANGERS:
            return None
        self.strangers += 1
        try:
            return await asyncio.wait_for(self._meet(reader, writer), entry.SECONDS)
        finally:
            self.strangers -= 1

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Coroutine[Any, Any, None] | None:
        if connection := writer.get_extra_info("socket"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        first = await reader.readexactly(len(entry.HELLO))
        if first.startswith(b"GET /"):
            numbers = {
                "/metrics": lambda: self.meter.text(self.now()),
                "/load": lambda: json.dumps({**self.load(), **self.meter.summary()}),
            }
            await web.answer(first, reader, writer, self.token, numbers)
            return None
        if first != entry.HELLO or not await entry.answered(reader, writer, self.key, self.address):
            return None
        message, body = await received(reader)
        if message["do"] == "watch":
            return self._watch(message["owner"], reader, writer)
        if message["do"] == "link":
            return self._link(message["lease"], message["link"], reader, writer)
        return self._lease(message, body, reader, writer) if message["do"] == "lease" else None

    async def _watch(self, owner: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        leases = self.owners.setdefault(owner, set())
        self.watching[owner] += 1
        try:
            while True:
                writer.write(frames.packed(self.load()))
                await asyncio.wait_for(received(reader), self.silence)
        finally:
            self.watching[owner] -= 1
            if not self.watching[owner]:  # else it has called again before this connection's end was seen
                del self.watching[owner], self.owners[owner]
                self.meter.counts["expired"] += len(leases)
                if leases:
                    print(f"an owner has ended or is silent: {len(leases)} sandboxes of it end", flush=True)
                for task in leases:
                    task.cancel()

    async def _lease(self, request: dict[str, Any], body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.count += 1
        lease = Lease(f"{self.count}", request["owner"], time.monotonic(), writer)
        if (leases := self.owners.get(lease.owner)) is None:
            return lease.say({"failed": "its owner does not beat", "lost": True})
        task = asyncio.current_task()
        assert task
        leases.add(task)
        snapshot = ""
        try:
            spec = read(request["spec"])
            if why := self.room.never(spec):
                return lease.say({"failed": why})
            if not await self._enter(lease, spec, min(request["patience"], MOST_WAIT), reader):
                return lease.say({"full": self.load()})
            try:
                if body:
                    snapshot = await self._stored(body)
                kept = await self.keeper.take(spec, snapshot or None)
            except BaseException:
                self.room.leave(lease.name)
                raise
            kept.end.add_done_callback(lambda _: self._ended(lease, kept))
            await self._carry(lease, kept, reader)
        except ValueError as error:
            lease.say({"failed": f"{error}"})
        except (Failed, OSError) as error:
            self.meter.counts["failed"] += 1
            lease.say({"failed": f"{error}"})
        finally:
            leases.discard(task)
            if snapshot:
                os.unlink(snapshot)

    async def _enter(self, lease: Lease, spec: dict[str, Any], patience: float, reader: asyncio.StreamReader) -> bool:
        """Waits for a place for as long as the client does. Raises ConnectionResetError where it has gone."""
        place = asyncio.ensure_future(self.room.enter(lease.name, spec, patience))
        gone = asyncio.ensure_future(reader.read(1))  # it says nothing before it is answered
        try:
            await asyncio.wait({place, gone}, timeout=0, return_when=asyncio.FIRST_COMPLETED)
            if not place.done():
                lease.say({"line": self.load()})
            await asyncio.wait({place, gone}, return_when=asyncio.FIRST_COMPLETED)
            if place.done():
                return place.result()
            raise ConnectionResetError
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.result():
                self.room.leave(lease.name)
            raise
        finally:
            gone.cancel()
            if not place.done():
                place.cancel()

    async def _stored(self, body: bytes) -> str:
        await self.keeper.owner.start()  # its folder
        with tempfile.NamedTemporaryFile(dir=self.keeper.owner.folder, suffix=".tar", delete=False) as file:
            file.write(body)
        return file.name

    async def _carry(self, lease: Lease, kept: Kept, reader: asyncio.StreamReader) -> None:
        """Between the client and its sandbox until one of them ends."""
        assert kept.channel
        lease.kept, self.leases[lease.name] = kept, lease
        self.meter.counts["leases"] += 1
        kept.heard = lambda message, body, fds: self._said(lease, kept, message, body, fds)
        self.keeper.stirred.set()
        lease.say({"leased": lease.name, "load": self.load()})
        talking = asyncio.ensure_future(self._listen(lease, kept, reader))
        try:
            await asyncio.wait({talking, kept.end}, return_when=asyncio.FIRST_COMPLETED)
            if kept.end.done():
                end = kept.end.result()
                await asyncio.sleep(0.05)  # its own last word may still be on its way
                lease.say({"gone": end.why, "lost": end.lost})
        except asyncio.CancelledError:
            lease.say({"gone": "its owner was silent", "lost": True})
            raise
        finally:
            talking.cancel()
            del self.leases[lease.name]
            for connection in lease.links.values():
                connection.close()
            self.keeper.close(kept)

    async def _listen(self, lease: Lease, kept: Kept, reader: asyncio.StreamReader) -> None:
        assert kept.channel
        with contextlib.suppress(*GONE, ValueError):
            while True:
                message, body = await received(reader)
                if message["do"] == "look":
                    lease.say({"done": message["id"], "killed": await self.keeper.owner.killed(kept.name), "code": 0})
                    continue
                if message["do"] == "exec" and not lease.served:
                    lease.execs.add(message["id"])
                await kept.channel.send(message, body)

    def _said(self, lease: Lease, kept: Kept, message: dict[str, Any], body: bytes, fds: list[int]) -> None:
        if "port" in message:
            for fd in fds:
                self.count += 1
                number, lease.links[self.count] = self.count, socket.socket(fileno=fd)
                lease.say({"port": message["port"], "lease": lease.name, "link": number})
                asyncio.get_running_loop().call_later(LINK_SECONDS, self._unfetched, lease, number)
            return
        if "done" in message:
            self.meter.limited["timeout"] += bool(message.get("late"))
            if not lease.served and message["done"] in lease.execs:
                lease.served = True
                self.meter.first_command(time.monotonic() - lease.began)
        lease.say(message, body)
        if kept.channel and lease.writer.transport.get_write_buffer_size() > MOST_AHEAD:
            kept.channel.hold(True)
            self._run(self._until_read(lease, kept))

    async def _until_read(self, lease: Lease, kept: Kept) -> None:
        with contextlib.suppress(ConnectionError):
            await lease.writer.drain()
        if kept.channel:
            kept.channel.hold(False)

    def _unfetched(self, lease: Lease, number: int) -> None:
        if connection := lease.links.pop(number, None):
            connection.close()

    async def _link(self, name: str, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lease = self.leases.get(name)
        if lease is None or (connection := lease.links.pop(number, None)) is None:
            return
        there, here = await asyncio.open_connection(sock=connection)
        both = [asyncio.ensure_future(_pass_on(reader, here)), asyncio.ensure_future(_pass_on(there, writer))]
        try:
            await asyncio.wait(both)
        finally:
            for each in both:
                each.cancel()
            here.close()

    def _ended(self, lease: Lease, kept: Kept) -> None:
        end = kept.end.result()
        self.meter.limited["memory"] += bool(end.killed)
        self.meter.limited["processes"] += bool(end.refused)
        self.room.leave(lease.name)
        self.keeper.stirred.set()

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)


async def received(reader: asyncio.StreamReader) -> tuple[dict[str, Any], bytes]:
    """A message. Raises as StreamReader.readexactly; ValueError."""
    header, body = frames.sizes(await reader.readexactly(frames.HEAD.size))
    return json.loads(await reader.readexactly(header)), await reader.readexactly(body)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(PIECE):
            writer.write(data)
            await writer.drain()
        writer.write_eof()


def settings(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="sandbox pool", description=__doc__)
    parser.add_argument("--listen", required=True, help="ADDRESS:PORT, by which jobs reach it")
    parser.add_argument("--number", type=int, required=True, help="sandboxes at a time")
    parser.add_argument("--warm", type=int, default=0, help="sandboxes that are ready")
    parser.add_argument("--silence", type=float, default=SILENCE, help="seconds without a beat, after which an owner is taken for dead")
    parser.add_argument("--memory-mb", type=int, default=0, help="memory of all together; default: not limited")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    known = settings(arguments)
    try:
        token = entry.token_of(os.environ)
    except ValueError as error:
        print(f"sandbox pool: {error}", file=sys.stderr)
        return 2
    host, _, port = known.listen.rpartition(":")
    host = host.strip("[]")

    async def run() -> int:
        room = Room(known.number, known.memory_mb, min(known.warm, known.number))
        pool = Pool(room, token, f"{host}:{port}", known.silence)
        serving = asyncio.ensure_future(pool.serve(host, int(port)))
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
        try:
            await serving
        except asyncio.CancelledError:
            return 0
        except (Failed, OSError) as error:
            print(f"sandbox pool: {error}", file=sys.stderr)
            return 1
        finally:
            pool.keeper.owner.close()
        return 0

    os.umask(0o077)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # two for each sandbox, and more for its connections
    return asyncio.run(run())
