"""Who a pool of sandboxes believes, and what is left where one of both ends: nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
from support.sandbox_pools import SMALL, TOKEN, playing, until

from trainer.environments.sandboxes import pools as module
from trainer.environments.sandboxes.host import entry
from trainer.environments.sandboxes.host.owner import PROGRAM
from trainer.environments.sandboxes.pools import WHERE, Pools, Watch
from trainer.environments.sandboxes.spec import Lost, SandboxError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
ROOT = Path(__file__).parents[5]


def test_a_pool_on_an_address_that_is_taken_or_without_a_token_says_so_in_one_line():
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, "-I", "-S", "-B", str(PROGRAM), "pool", "--number", "1", "--listen"]
        command.append(f"127.0.0.1:{server.getsockname()[1]}")
        env = {"RAY_AUTH_TOKEN": TOKEN, "PATH": os.environ["PATH"]}
        taken = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
        assert taken.returncode == 1 and "address already in use" in taken.stderr and len(taken.stderr.splitlines()) == 1
        bare = subprocess.run(command, env={"HOME": "/nowhere"}, capture_output=True, text=True, timeout=300, check=False)
        assert (bare.returncode, bare.stderr.split(",")[0]) == (2, "sandbox pool: the cluster has no token")


def test_who_does_not_know_the_token_gets_nothing(started, monkeypatch):
    started.start("--number", "1")
    host, _, port = started.addresses[0].rpartition(":")

    async def body(provider: Pools) -> None:
        assert started.ask("/health", token="") == "ok\n"
        for path in ("/metrics", "/load"):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                started.ask(path, token="wrong")
        with pytest.raises(entry.Closed, match="another token"):
            entry.connected(host, int(port), entry.key_of("wrong"))

    playing(started, monkeypatch, body)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "wrong")
    monkeypatch.setattr(module, "START_SECONDS", 5)
    with pytest.raises(SandboxError, match=r"no pool answers within 5 s: .*another token"):
        playing(started, monkeypatch, body)


def test_what_answers_in_a_pools_place_is_not_believed_and_learns_no_token():
    key = entry.key_of(TOKEN)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        pid = os.fork()
        if pid == 0:
            connection, _ = server.accept()
            connection.recv(24)
            connection.sendall(b"n" * 16)
            connection.recv(32)
            connection.sendall(b"p" * 32)
            os._exit(0)
        with pytest.raises(entry.Refused, match="no pool of this cluster"):
            entry.connected("127.0.0.1", port, key)
        os.waitpid(pid, 0)
    assert entry.proof(key, b"client", "10.0.0.1:8270", b"a") != entry.proof(key, b"client", "10.0.0.2:8270", b"a")


CLIENT = """
    import asyncio, os
    from trainer.environments.sandboxes.pools import Pools
    from trainer.environments.sandboxes.spec import Spec

    async def main():
        pools = Pools()
        await pools.check()
        machine = await pools.create(Spec(memory_mb=64, disk_mb=16))
        await machine.exec("sleep 1000 & true")
        print("ready", flush=True)
        await asyncio.sleep(1000)

    asyncio.run(main())
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_what_a_dead_or_a_silent_owner_left_ends(started, end):
    started.start("--number", "1", "--silence", "6")
    env = {**os.environ, WHERE: started.urls, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(CLIENT)], env=env, stdout=subprocess.PIPE, text=True) as client:
        try:
            assert client.stdout and client.stdout.readline() == "ready\n"
            assert started.value("in_use") == 1
            client.send_signal(end)
            asyncio.run(until(lambda: started.value("in_use") == 0, "the end of its sandbox", 120))
        finally:
            client.kill()


def test_a_killed_pool_takes_its_sandboxes_along_and_another_one_goes_on(started, monkeypatch):
    pool = started.start("--number", "2", "--warm", "1")

    async def body(provider: Pools) -> None:
        machine = await provider.create(SMALL)
        running = asyncio.ensure_future(machine.exec("sleep 1000"))
        await asyncio.sleep(0.2)
        below = psutil.Process(pool.pid).children(recursive=True)
        assert len(below) >= 2  # a warden, and the sandbox
        pool.kill()
        with pytest.raises(Lost, match=r"its pool on 127\.0\.0\.1:\d+ has ended"):
            await running
        _, left = await asyncio.to_thread(psutil.wait_procs, below, 30)
        assert not left
        pool.wait()
        started.start("--number", "2", address=started.addresses[0])
        assert (await (await provider.create(SMALL)).exec("echo again")).stdout == "again\n"

    playing(started, monkeypatch, body)


def test_an_owner_that_calls_again_keeps_what_it_has(started, monkeypatch):
    started.start("--number", "2", "--silence", "6")

    async def body(provider: Pools) -> None:
        machine = await provider.create(SMALL)
        second = Watch(provider.watches[0].host, provider.watches[0].port, provider.watches[0].key, provider.owner)
        second.start()
        await until(lambda: second.load, "the second one")
        provider.watches[0].closing.set()
        await asyncio.to_thread(provider.watches[0].join)
        await asyncio.sleep(1)
        assert (await machine.exec("echo here")).stdout == "here\n" and started.value("expired_total") == 0
        assert (await (await provider.create(SMALL)).exec("echo too")).stdout == "too\n"
        second.closing.set()
        await until(lambda: started.value("in_use") == 0, "the end of all")
        assert started.value("expired_total") == 2

    playing(started, monkeypatch, body)


def test_a_killed_warden_is_replaced(started, monkeypatch):
    pool = started.start("--number", "2")

    async def body(provider: Pools) -> None:
        machine = await provider.create(SMALL)
        [warden] = psutil.Process(pool.pid).children()
        warden.kill()
        with pytest.raises(Lost, match="the process that holds the sandboxes has ended"):
            await machine.exec("sleep 5")
        await until(lambda: started.value("in_use") == 0, "the end of what it held")
        assert (await (await provider.create(SMALL)).exec("echo again")).stdout == "again\n"

    playing(started, monkeypatch, body)
