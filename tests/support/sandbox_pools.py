"""Pools of sandboxes as processes of this machine, for tests."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import psutil
import pytest

from trainer.environments.sandboxes.host.owner import PROGRAM
from trainer.environments.sandboxes.pools import WHERE, Pools
from trainer.environments.sandboxes.spec import Spec

TOKEN = "0123456789abcdef" * 2
ASK = """
import asyncio, collections
from trainer.environments.sandboxes.providers import chosen
from trainer.environments.sandboxes.spec import Spec

async def main():
    provider = await chosen("auto")
    made = await asyncio.gather(*(provider.create(Spec(memory_mb=64, disk_mb=8)) for _ in range(COUNT)))
    said = {(await each.exec("echo 42")).stdout for each in made}
    hosts = collections.Counter(each.watch.host for each in made)
    print("ASKED", provider.name, said, sorted(hosts), sorted(hosts.values()), flush=True)
    provider.close()

asyncio.run(main())
"""
SMALL = Spec(memory_mb=64, disk_mb=16)


def asking(count: int) -> str:
    """A program for a job, which says whose sandboxes so many are."""
    return ASK.replace("COUNT", str(count))


class Started:
    """Processes of pools, each with an address of its own."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.addresses: list[str] = []

    def start(self, *flags: str, address: str = "", python: Sequence[str] = (sys.executable,)) -> subprocess.Popen[bytes]:
        if not address:
            with socket.create_server(("127.0.0.1", 0)) as probe:
                address = f"127.0.0.1:{probe.getsockname()[1]}"
            self.addresses.append(address)
        command = [*python, "-I", "-S", "-B", str(PROGRAM), "pool", "--listen", address, *flags]
        self.processes.append(subprocess.Popen(command, env={"PATH": os.environ["PATH"], "RAY_AUTH_TOKEN": TOKEN}))
        return self.processes[-1]

    def ask(self, path: str, token: str = TOKEN, pool: int = 0) -> str:
        headers = {"Authorization": f"Bearer {token}"}
        with urllib.request.urlopen(urllib.request.Request(f"http://{self.addresses[pool]}{path}", headers=headers), timeout=60) as answer:
            return answer.read().decode()

    def value(self, name: str) -> float:
        lines = dict(line.rsplit(" ", 1) for line in self.ask("/metrics").splitlines() if line[0] != "#")
        return float(lines[f"flotilla_sandboxes_{name}"])

    @property
    def urls(self) -> str:
        return ",".join(f"http://{address}" for address in self.addresses)

    def close(self) -> None:
        wardens = [child for each in self.processes if each.poll() is None for child in psutil.Process(each.pid).children()]
        for each in self.processes:
            each.terminate()
        for each in self.processes:
            each.wait(60)
        assert not psutil.wait_procs(wardens, timeout=60)[1], "a warden is left"


def playing(started: Started, monkeypatch: pytest.MonkeyPatch, body: Callable[[Pools], Awaitable[None]], wait: float = 60) -> None:
    monkeypatch.setenv(WHERE, started.urls)

    async def run() -> None:
        provider = Pools()
        provider.wait = wait
        try:
            async with asyncio.timeout(300):
                await provider.check()
                await body(provider)
        finally:
            provider.close()

    asyncio.run(run())


async def until(condition: Callable[[], Any], what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        await asyncio.sleep(0.05)
