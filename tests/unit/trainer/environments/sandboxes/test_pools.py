"""Sandboxes of a pool: a process of another node, which several runs share."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time
from typing import Any

import pytest
from support.sandbox_pools import SMALL, playing, until
from support.talks import CHARACTERS

from trainer.configs.sandbox import SandboxConfig
from trainer.environments.policy import Limits, Policy
from trainer.environments.runner import Job, Runner
from trainer.environments.sandboxes.episode import Sandboxes
from trainer.environments.sandboxes.host.owner import PROGRAM
from trainer.environments.sandboxes.pools import WHERE, PoolMachine, Pools
from trainer.environments.sandboxes.providers import chosen
from trainer.environments.sandboxes.relay import to_address
from trainer.environments.sandboxes.spec import Lost, SandboxError, Spec, Unavailable
from trainer.episodes import Prompt, Turn
from trainer.models import character_tokenizer
from trainer.rewards.terms import Reward

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")


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

    limits = Limits(turns=9, turn_tokens=5, tokens=50, seconds=120)
    runner = Runner(Reward("mine", rollout, batched=False, awaited=True), tokenizer, limits, sandboxes=sandboxes)
    runner.begin([Job((i, 0), Prompt(i, [1], {}), 3) for i in range(7)])
    ended, most, deadline = [], 0, time.monotonic() + 240
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
        assert str(raised.value).startswith(f"no room for a sandbox within 3 s (environment.sandbox.wait): {full}")
        assert not isinstance(raised.value, Lost)

    playing(started, monkeypatch, body, wait=3)


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
