"""Ports of this node that are free, and what answers on those of others."""

from __future__ import annotations

import contextlib
import errno
import random
import selectors
import socket
import time
from collections.abc import Iterable

from .errors import HeadEnded

FREE_PORTS = range(20_000, 32_768)  # above those of Ray's workers
ASKED_AT_ONCE = 256  # hosts: a process may have few more descriptors
PROBE_SECONDS = 3  # within which a host answers that is there
SHUTDOWN_NOTICE = b"flotilla: the job is done"  # what workers hear on Ray's port, to tell an end from a death


def free_port() -> int:
    """One that nothing uses, from below those that Linux gives to whoever asks for any: none of these takes it before its user does."""
    first = random.SystemRandom().randrange(len(FREE_PORTS))
    return next(port for port in [*FREE_PORTS[first:], *FREE_PORTS[:first]] if port_is_free(port, ""))


def port_is_free(port: int, address: str = "127.0.0.1") -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was closed a moment ago is free
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True


def port_answers(address: str, port: int, listen: bool = False) -> bool | None:
    """True: it is open. False: it refuses, nothing listens. None: no answer, which may be the network.

    With `listen`, raises HeadEnded at its shutdown notice.
    """
    try:
        with socket.create_connection((address, port), timeout=3) as probe:
            probe.settimeout(1)
            with contextlib.suppress(TimeoutError):
                if listen and probe.recv(len(SHUTDOWN_NOTICE)) == SHUTDOWN_NOTICE:
                    raise HeadEnded
    except ConnectionRefusedError:
        return False
    except OSError:
        return None
    return True


def silent(addresses: Iterable[str], port: int) -> set[str]:
    """Hosts that do not answer; ASKED_AT_ONCE at a time. A port that refuses is an answer: the host is there."""
    left, found = list(addresses), set[str]()
    while left:
        asked, left = left[:ASKED_AT_ONCE], left[ASKED_AT_ONCE:]
        found |= _silent(asked, port)
    return found


def _silent(addresses: list[str], port: int) -> set[str]:
    """Of a few, asked at once. Not by select(), which takes no descriptor from 1,024 on."""
    with contextlib.ExitStack() as stack:
        waiting, found = set(addresses), set[str]()
        answers = stack.enter_context(selectors.DefaultSelector())
        for address in waiting:
            probe = stack.enter_context(socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET))
            probe.setblocking(False)
            if probe.connect_ex((address, port)) in (0, errno.EINPROGRESS, errno.ECONNREFUSED):
                answers.register(probe, selectors.EVENT_WRITE, (address, probe))
            else:  # no way to it
                found.add(address)
        waiting -= found
        deadline = time.monotonic() + PROBE_SECONDS
        # Looked at once more at the deadline: this process may have stood still itself, while the answers came.
        while waiting and (answered := answers.select(max(0.0, deadline - time.monotonic()))):
            for key, _ in answered:
                address, probe = key.data
                answers.unregister(probe)
                waiting.remove(address)
                if probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) not in (0, errno.ECONNREFUSED):
                    found.add(address)
        return found | waiting
