"""Who is asked whether it is there: many hosts, with few descriptors or high ones."""

from __future__ import annotations

import errno
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster_tasks.node import ports
from cluster_tasks.node.ports import free_port, silent


@pytest.fixture
def high_descriptors() -> Iterator[None]:
    """All below 1,100 are taken, as on a head with a thousand connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 3000 if hard == resource.RLIM_INFINITY else min(hard, 3000)
    if wanted < 2000:
        pytest.skip("the system gives a process fewer than 2,000 descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    taken = [os.open("/dev/null", os.O_RDONLY)]
    while taken[-1] < 1100:
        taken.append(os.dup(taken[0]))
    yield
    for each in taken:
        os.close(each)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def addresses(count: int) -> list[str]:
    return [f"127.0.{index // 200 + 1}.{index % 200 + 1}" for index in range(count)]


@pytest.mark.parametrize("count", [1, 255, 256, 257, 1100])
def test_hosts_are_asked_with_descriptors_beyond_1024(count: int, high_descriptors: None) -> None:
    """select() takes none of those."""
    assert silent(addresses(count), free_port()) == set(), "a port that refuses is an answer"


def test_who_has_answered_is_not_silent_though_we_stood_still_for_all_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "PROBE_SECONDS", -1)
    assert silent(addresses(5), free_port()) == set()


def test_few_descriptors_are_enough_for_many_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len([*Path("/proc/self/fd").iterdir()])
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 280, hard))
    try:
        assert silent(addresses(2000), free_port()) == set()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_those_that_are_silent_are_found_in_every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener whose queue is full drops packets, as a host that is cut off does."""
    monkeypatch.setattr(ports, "ASKED_AT_ONCE", 3)
    monkeypatch.setattr(ports, "PROBE_SECONDS", 0.3)
    with socket.socket() as full:
        full.bind(("127.0.9.9", 0))
        full.listen(0)
        port, waiting = full.getsockname()[1], []
        for _ in range(4):
            waiting.append(socket.socket())
            waiting[-1].setblocking(False)
            waiting[-1].connect_ex(("127.0.9.9", port))
        asked = [*addresses(4), "127.0.9.9", *addresses(6)[4:]]
        assert silent(asked, port) == {"127.0.9.9"}
        for each in waiting:
            each.close()


@pytest.mark.parametrize("code", [errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL])
def test_a_host_that_no_way_leads_to_is_silent(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel says so at once, and afterwards that the socket has no error."""
    monkeypatch.setattr(socket.socket, "connect_ex", lambda self, address: code, raising=True)
    assert silent(["192.0.2.77"], 1) == {"192.0.2.77"}
