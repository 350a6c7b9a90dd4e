"""The event loop's side of a warden: what happens between two lines, where one end is closed or never began."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any, cast

import pytest

from trainer.environments.sandboxes.host import warden
from trainer.environments.sandboxes.host.channel import Channel
from trainer.environments.sandboxes.host.owner import Failed, Owner

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
BODY = b"0" * (8 << 20)  # more than a socket takes


@pytest.mark.parametrize("who", ["this", "other"])
def test_what_is_being_sent_when_an_end_is_closed_is_an_error_and_no_wait(who):
    async def body() -> None:
        mine, other = socket.socketpair()
        lost = asyncio.Event()
        channel = Channel(mine, lambda *_: None, lost.set)
        sending = asyncio.ensure_future(channel.send({"do": "write"}, BODY))
        await asyncio.sleep(0.05)
        assert not sending.done()
        channel.close() if who == "this" else other.close()
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(sending, 60)
        other.close()
        with pytest.raises(ConnectionError):
            await channel.send({"do": "write"})
        # The number of the closed descriptor is free for another one.
        first, second = socket.socketpair()
        with first, second:
            assert mine.fileno() == -1
            asyncio.get_running_loop().add_reader(first.fileno(), lost.set)
            asyncio.get_running_loop().add_reader(second.fileno(), lost.set)
            asyncio.get_running_loop().remove_reader(first.fileno())
            asyncio.get_running_loop().remove_reader(second.fileno())

    asyncio.run(body())


def test_descriptors_that_wait_for_room_are_an_error_when_the_end_is_closed():
    async def body() -> None:
        mine, other = socket.socketpair()
        channel = Channel(mine, lambda *_: None, lambda: None)
        with contextlib.suppress(BlockingIOError):
            while True:
                mine.send(BODY)
        sending = asyncio.ensure_future(channel.send({"do": "create"}, fds=[0]))
        await asyncio.sleep(0.05)
        channel.close()
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(sending, 60)
        other.close()

    asyncio.run(body())


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def test_a_warden_that_cannot_be_started_leaves_nothing_and_may_be_started_later(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)

    async def body() -> None:
        owner, before = Owner(), descriptors()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", "/nowhere/python")
            for _ in range(2):
                with pytest.raises(Failed, match=r"cannot be started: .*No such file"):
                    await asyncio.wait_for(owner.start(), 60)
        assert descriptors() == before and not [*tmp_path.iterdir()]
        await owner.start()
        owner.close()

    asyncio.run(body())


def test_a_warden_that_ends_right_after_its_first_word_is_said_to_have_ended():
    async def body() -> None:
        owner = Owner()
        starting = asyncio.ensure_future(owner.start())
        await asyncio.sleep(0)
        assert owner.channel
        owner._heard({"hello": [], "root": False}, b"", [])
        owner.channel.close()
        owner._lost()
        with pytest.raises(Failed, match=r"the process that holds the sandboxes has ended"):
            await asyncio.wait_for(starting, 60)
        owner.close()

    asyncio.run(body())


def test_who_has_the_number_of_a_sandbox_that_has_ended_is_left_alone(monkeypatch):
    class Group:  # that the kernel has not emptied yet
        def remove(self) -> bool:
            return False

    monkeypatch.setattr(warden, "GROUP_SECONDS", 0.2)
    mine, other = socket.socketpair()
    with mine, other, subprocess.Popen(["sleep", "600"]) as stranger:
        try:
            held = warden.Warden(mine)
            for until in (time.monotonic() + 60, None):
                held.boxes["1"] = warden.Box("1", stranger.pid, cast("Any", Group()), until)
                held._do({"do": "end", "name": "1"}, b"", [])
                if until:
                    held.close()
                    assert stranger.poll() is None
            assert stranger.wait(60) == -signal.SIGKILL, "a sandbox that has not ended is ended"
        finally:
            stranger.kill()
