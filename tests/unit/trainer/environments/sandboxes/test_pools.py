"""Sandboxes of a pool: a process of another node, which several runs share."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.talks import CHARACTERS

from trainer.configs.sandbox import SandboxConfig
from trainer.environments.policy import Limits, Policy
from trainer.environments.runner import Job, Runner
from trainer.environments.sandboxes import pools as module
from trainer.environments.sandboxes.episode import Sandboxes
from trainer.environments.sandboxes.host import entry
from trainer.environments.sandboxes.host.owner import PROGRAM
from trainer.environments.sandboxes.pools import WHERE, PoolMachine, Pools, Watch
from trainer.environments.sandboxes.providers import chosen
from trainer.environments.sandboxes.relay import to_address
from trainer.environments.sandboxes.spec import Lost, SandboxError, Spec, Unavailable
from trainer.episodes import Prompt, Turn
from trainer.models import character_tokenizer
from trainer.rewards.terms import Reward

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
ROOT = Path(__file__).parents[5]
TOKEN = "0123456789abcdef" * 2
SMALL = Spec(memory_mb=64, disk_mb=16)


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
        with urllib.request.urlopen(urllib.request.Request(f"http://{self.addresses[pool]}{path}", headers=headers), timeout=20) as answer:
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
            each.wait(20)
        assert not psutil.wait_procs(wardens, timeout=20)[1], "a warden is left"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    made = Started()
    try:
        yield made
    finally:
        made.close()


def playing(started: Started, monkeypatch: pytest.MonkeyPatch, body: Callable[[Pools], Awaitable[None]], wait: float = 20) -> None:
    monkeypatch.setenv(WHERE, started.urls)

    async def run() -> None:
        provider = Pools()
        provider.wait = wait
        try:
            async with asyncio.timeout(90):
                await provider.check()
                await body(provider)
        finally:
            provider.close()

    asyncio.run(run())


async def until(condition: Callable[[], Any], what: str, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        await asyncio.sleep(0.05)


def test_a_warm_one_is_handed_over_and_who_finds_no_room_waits_for_one_that_ends(started, monkeypatch):
    started.start("--number", "2", "--warm", "1")

    async def body(provider: Pools) -> None:
        await until(lambda: started.value("ready") == 1, "a warm sandbox")
        first = await provider.create(Spec())
        assert (await first.exec("cd /tmp; export A=1; echo out; exit 3")).code == 3
        assert (await first.exec("pwd; echo $A")).stdout == "/tmp\n1\n"
        assert started.value("cold_total") == 0 and started.value("first_command_seconds_count") == 1
        second = await provider.create(SMALL)
        waiting = asyncio.ensure_future(provider.create(SMALL))
        await until(lambda: started.value("waiting") == 1, "one that waits")
        assert not waiting.done() and started.value("in_use") == 2
        second.close()
        third = await waiting
        await third.write("it", "mine")
        assert await third.text("it") == "mine"
        with pytest.raises(SandboxError, match="it was closed"):
            await second.exec("true")

    playing(started, monkeypatch, body)
    assert started.value("in_use") <= 2


def test_episodes_that_wait_for_room_hold_up_none_of_those_that_have_it(started, monkeypatch):
    """All of a batch wait for one another's turns; more of them than there is room for end nevertheless."""
    started.start("--number", "2")
    monkeypatch.setenv(WHERE, started.urls)
    sandboxes = Sandboxes(SandboxConfig(provider="pool", memory_mb=64, disk_mb=8))
    tokenizer = character_tokenizer(CHARACTERS)

    async def rollout(policy: Policy, row: dict[str, Any]) -> float:
        await policy.sandbox.exec("true")
        await policy.generate()
        await asyncio.sleep(0.3)
        return float((await policy.sandbox.exec("echo 1")).stdout)

    limits = Limits(turns=9, turn_tokens=5, tokens=50, seconds=15)
    runner = Runner(Reward("mine", rollout, batched=False, awaited=True), tokenizer, limits, sandboxes=sandboxes)
    runner.begin([Job((i, 0), Prompt(i, [1], {}), 3) for i in range(7)])
    ended, most, deadline = [], 0, time.monotonic() + 60
    while runner.tasks:
        assert time.monotonic() < deadline
        asked, more = runner.advance(whole=True)
        ended += more
        most = max(most, len(asked))
        runner.answer({each.name: Turn([5], [-0.5], "stop") for each in asked})
    sandboxes.close()
    assert most <= 2 and [each.reward for each in ended] == [1.0] * 7 and not any(each.mistake for each in ended)


def test_the_deadline_says_what_was_waited_for(started, monkeypatch):
    started.start("--number", "1")

    async def body(provider: Pools) -> None:
        await provider.create(SMALL)
        with pytest.raises(SandboxError) as raised:
            await provider.create(SMALL)
        where = started.addresses[0]
        full = f"{where}: 1 of 1 in use, 0 waiting; raise fleets[].sandboxes.number"
        assert str(raised.value).startswith(f"no room for a sandbox within 1 s (environment.sandbox.wait): {full}")
        assert not isinstance(raised.value, Lost)

    playing(started, monkeypatch, body, wait=1)


def test_the_pool_that_is_the_least_full_is_taken(started, monkeypatch):
    started.start("--number", "1")
    started.start("--number", "3")

    async def body(provider: Pools) -> None:
        await until(lambda: len(provider.reached()) == 2, "both pools")
        made = await asyncio.gather(*(provider.create(SMALL) for _ in range(4)))
        hosts = sorted(each.watch.port for each in made)
        ports = [int(address.rpartition(":")[2]) for address in started.addresses]
        assert hosts == sorted([ports[0], *[ports[1]] * 3])

    playing(started, monkeypatch, body)


def test_files_ports_and_limits_are_as_on_this_node(started, monkeypatch):
    started.start("--number", "3")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"<" + await reader.readexactly(3) + b">")
        writer.close()

    async def body(provider: Pools) -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        spec = Spec(memory_mb=64, disk_mb=16, ports=(7070,))
        machine = await provider.create(spec, None, {7070: to_address("127.0.0.1", port)})
        talk = "exec 3<>/dev/tcp/127.0.0.1/7070; printf abc >&3; cat <&3"
        assert (await machine.exec(["bash", "-c", talk])).stdout == "<abc>"
        await machine.write_all({"a/b": "x" * 300_000}, "/workspace")
        taken = await machine.snapshot()
        other = await provider.create(SMALL, taken)
        assert (await other.exec("wc -c < a/b")).stdout.strip() == "300000"
        assert (await (await machine.fork()).exec("cat a/b | tail -c 2")).stdout == "xx"
        big = await other.exec(["python3", "-c", "x = 'a' * 200_000_000"])
        assert big.out_of_memory or "MemoryError" in big.stderr
        assert (await machine.exec("sleep 60", timeout=0.3)).timed_out
        await other.exec("for i in $(seq 90); do sleep 9 & done 2>/dev/null")
        other.close()
        await until(lambda: started.value("in_use") == 2, "the end of one")
        assert started.value('limited_total{limit="timeout"}') == 1
        if "memory_mb" not in provider.unheld():
            assert started.value('limited_total{limit="memory"}') == 1
        if "processes" not in provider.unheld():
            assert started.value('limited_total{limit="processes"}') == 1
        server.close()

    playing(started, monkeypatch, body)


NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")


def may_run(*command: str) -> bool:
    return os.geteuid() == 0 and shutil.which(command[0]) is not None and subprocess.run(command, check=False).returncode == 0


@pytest.mark.skipif(
    not may_run(*NOBODY, "/usr/bin/python3", "-c", f"open({str(PROGRAM / 'pool.py')!r})"), reason="needs root, which becomes nobody"
)
def test_an_ordinary_user_has_a_pool_that_says_which_limits_it_cannot_hold(started, monkeypatch):
    started.start("--number", "2", python=(*NOBODY, "/usr/bin/python3"))

    async def body(provider: Pools) -> None:
        assert {"memory_mb", "processes"} <= {*provider.unheld()}
        machine = await provider.create(SMALL)
        assert (await machine.exec("touch it; ls")).stdout == "it\n"
        assert "MemoryError" in (await machine.exec(["python3", "-c", "x = 'a' * 200_000_000"])).stderr
        with pytest.raises(Unavailable, match=r"pool: cannot hold .*memory_mb.* for a whole sandbox \(environment.sandbox.strict\)"):
            await chosen("pool", strict=True)

    playing(started, monkeypatch, body)


def test_a_pool_on_an_address_that_is_taken_or_without_a_token_says_so_in_one_line():
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, "-I", "-S", "-B", str(PROGRAM), "pool", "--number", "1", "--listen"]
        command.append(f"127.0.0.1:{server.getsockname()[1]}")
        env = {"RAY_AUTH_TOKEN": TOKEN, "PATH": os.environ["PATH"]}
        taken = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
        assert taken.returncode == 1 and "address already in use" in taken.stderr and len(taken.stderr.splitlines()) == 1
        bare = subprocess.run(command, env={"HOME": "/nowhere"}, capture_output=True, text=True, timeout=60, check=False)
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
    monkeypatch.setattr(module, "START_SECONDS", 0.5)
    with pytest.raises(SandboxError, match=r"no pool answers within 0.5 s: .*another token"):
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
    started.start("--number", "1", "--silence", "3")
    env = {**os.environ, WHERE: started.urls, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(CLIENT)], env=env, stdout=subprocess.PIPE, text=True) as client:
        try:
            assert client.stdout and client.stdout.readline() == "ready\n"
            assert started.value("in_use") == 1
            client.send_signal(end)
            asyncio.run(until(lambda: started.value("in_use") == 0, "the end of its sandbox", 30))
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
    started.start("--number", "2", "--silence", "3")

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


def test_what_a_node_cannot_have_is_refused_at_once(started, monkeypatch):
    started.start("--number", "2", "--memory-mb", "100")

    async def body(provider: Pools) -> None:
        with pytest.raises(
            SandboxError, match=r"memory_mb \+ disk_mb = 768, and all sandboxes of this node have 100 \(fleets\[\]\.sandboxes"
        ):
            await provider.create(Spec())
        with pytest.raises(SandboxError, match=r"/no/such/image: No such file or directory"):
            await provider.create(Spec(image="/no/such/image", memory_mb=32, disk_mb=8))
        await until(lambda: started.value("in_use") == 0, "its place is free again")
        assert isinstance(await provider.create(SMALL), PoolMachine)

    playing(started, monkeypatch, body)


def test_auto_takes_pools_where_the_cluster_has_some(started, monkeypatch, tmp_path):
    async def taken(name: str) -> str:
        provider = await chosen(name)
        provider.close()
        return provider.name

    monkeypatch.delenv(WHERE, raising=False)
    with pytest.raises(SandboxError, match=r"environment.sandbox.provider=pool: pool: this cluster has no pools of sandboxes: set fleets"):
        asyncio.run(taken("pool"))
    started.start("--number", "2")
    monkeypatch.setenv(WHERE, started.urls)
    assert asyncio.run(taken("auto")) == "pool"
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("HOME", str(tmp_path))  # where Ray would look for one
    with pytest.raises(SandboxError, match="the cluster has no token"):
        asyncio.run(taken("pool"))
