"""Sandboxes of a pool: made by its warden, kept warm, handed over."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any

from .channel import Channel
from .meter import Meter
from .owner import LATE, START_SECONDS, End, Failed, Owner
from .room import Room, kind

CLOSE_SECONDS = 5.0  # for a sandbox to end by itself once nobody listens
AGAIN_SECONDS = (1.0, 5.0, 30.0)  # after one that could not be made


class Kept:
    """A sandbox. `heard` gets what it says once it is handed over, `ended` how it ends."""

    def __init__(self, name: str, spec: Mapping[str, Any]):
        self.name, self.spec = name, spec
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ready.add_done_callback(lambda future: future.cancelled() or future.exception())  # nobody may wait for it any more
        self.end: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        self.heard: Callable[[dict[str, Any], bytes, list[int]], None] | None = None
        self.channel: Channel | None = None

    def first(self, message: dict[str, Any], body: bytes, fds: list[int]) -> None:
        if self.heard:
            self.heard(message, body, fds)
        elif not self.ready.done():
            if "ready" in message:
                self.ready.set_result(None)
            else:
                self.ready.set_exception(Failed(f"it did not start: {message.get('failed', message)}"))

    def ended(self, end: End) -> None:
        if not self.end.done():
            self.end.set_result(end)
        if not self.ready.done():
            self.ready.set_exception(Failed(end.why or "it has ended"))


class Keeper:
    def __init__(self, room: Room, meter: Meter):
        self.room, self.meter, self.owner = room, meter, Owner()
        self.warm: list[Kept] = []
        self.names = itertools.count(1)
        self.trouble = ""  # why none can be made
        self.stirred = asyncio.Event()
        self.sending: set[asyncio.Future[None]] = set()

    async def take(self, spec: Mapping[str, Any], snapshot: str | None) -> Kept:
        """A sandbox that runs commands, a warm one where there is one of its kind. Raises Failed."""
        wanted = kind(spec)
        for each in self.warm if snapshot is None else []:
            if kind(each.spec) == wanted and each.ready.done() and not each.end.done():
                self.warm.remove(each)
                return each
        self.trim()
        self.meter.counts["cold"] += 1
        return await self.make(spec, snapshot)

    async def make(self, spec: Mapping[str, Any], snapshot: str | None = None) -> Kept:
        kept = Kept(f"{next(self.names)}", spec)
        try:
            end = await self.owner.create(kept.name, spec, snapshot, kept.ended)
            kept.channel = Channel(end, kept.first, lambda: None)
            await asyncio.wait_for(asyncio.shield(kept.ready), START_SECONDS)
        except LATE:
            self.close(kept)
            raise Failed(f"it did not start within {START_SECONDS:g} s") from None
        except BaseException:
            self.close(kept)
            raise
        return kept

    def close(self, kept: Kept) -> None:
        """It ends with its channel; one that does not is ended."""
        if kept.channel:
            kept.channel.close()
        if not kept.end.done():
            asyncio.get_running_loop().call_later(CLOSE_SECONDS, self._insist, kept)

    def _insist(self, kept: Kept) -> None:
        if not kept.end.done() and self.owner.channel:
            sending = asyncio.ensure_future(self._end(kept.name))
            self.sending.add(sending)  # or the event loop may forget it
            sending.add_done_callback(self.sending.discard)

    async def _end(self, name: str) -> None:
        with contextlib.suppress(ConnectionError):
            if self.owner.channel:
                await self.owner.channel.send({"do": "end", "name": name})

    def trim(self) -> None:
        """End warm ones that nobody asks for any more, or that stand in the way."""
        wanted = self.room.most_asked()
        fitting = [each for each in self.warm if kind(each.spec) == wanted and not each.end.done()]
        kept = fitting[: self.room.to_keep()]
        for each in self.warm:
            if each not in kept:
                self.close(each)
        self.warm = kept

    async def serve(self) -> None:
        """Keep as many warm as are to be, one after another; what episodes ask for comes first, as it is made at once."""
        failures = 0
        while True:
            self.stirred.clear()
            self.trim()
            spec = json.loads(self.room.most_asked())
            if len(self.warm) < self.room.to_keep():
                try:
                    self.warm.append(await self.make(spec))
                    self.trouble, failures = "", 0
                except (Failed, OSError) as error:
                    self.meter.counts["failed"] += 1
                    if not self.trouble:
                        print(f"no sandbox can be made: {error}", flush=True)
                    self.trouble = f"{error}"
                    await asyncio.sleep(AGAIN_SECONDS[min(failures, len(AGAIN_SECONDS) - 1)])
                    failures += 1
                continue
            with contextlib.suppress(*LATE):
                await asyncio.wait_for(self.stirred.wait(), CLOSE_SECONDS)  # a warm one may have died meanwhile
