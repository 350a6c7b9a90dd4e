"""Where the members of a weight sync meet before they connect: a store that they leave at once when one of them does not come."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

HERE, ALL, GONE = "here", "all members", "gone"  # keys: how many have come, that all have, and why one does not
CALL = 5  # seconds to reach it in
LOOK = 0.005  # seconds between two looks into it


class Meeting(dist.Store):  # pyright: ignore[reportPrivateImportUsage]
    """A store at this address, which the first member (`host`) serves. Who waits in it leaves once the meeting is called off."""

    def __init__(self, address: str, port: int, world: int, host: bool, patience: timedelta):
        super().__init__()
        c10d: Any = dist
        server = c10d.TCPStore(address, port, world, host, patience, wait_for_workers=False)
        self.store, self.world, self.patience = c10d.PrefixStore("weights", server), world, patience

    def assemble(self) -> None:
        """Wait until all members are here. Raises RuntimeError."""
        if self.add(HERE, 1) == self.world:
            self.set(ALL, b"")
        self.wait([ALL])

    def set(self, key: str, value: Any) -> None:
        self.store.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self.store.get(key)

    def add(self, key: str, value: int) -> int:
        return self.store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        return self.store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Until all are there. Raises RuntimeError, as torch's own stores do."""
        deadline = time.monotonic() + (timeout or self.patience).total_seconds()
        while not self.store.check(keys):
            if self.store.check([GONE]):
                raise RuntimeError(self.store.get(GONE).decode())
            if time.monotonic() > deadline:
                missing = [key for key in keys if not self.store.check([key])]
                raise RuntimeError(f"{', '.join(missing)} did not come")
            time.sleep(LOOK)


def call_off(address: str, port: int, why: str) -> None:
    """Tell all that wait there for a member who does not come."""
    with suppress(RuntimeError):  # nobody may be there any more
        Meeting(address, port, 1, False, timedelta(seconds=CALL)).set(GONE, why)
