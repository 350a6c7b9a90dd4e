"""A run's process, wherever it was started: its threads and its address."""

from __future__ import annotations

import contextlib
import ctypes
import platform
import random
import socket
import sys
from typing import Any

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h; https://man7.org/linux/man-pages/man3/mallopt.3.html
MMAP_BYTES, TRIM_BYTES = 32 << 20, (1 << 31) - 1  # the most that it takes: a tensor above it, and memory free at the end, go back
FREE_PORTS = range(20_000, 32_768)  # above those of Ray's workers


def settle(threads: int | None) -> None:
    """In an actor's own process: how many threads torch has, and that freed memory stays with the process for the next step.

    By default glibc gives the activations of every step back to the kernel, and has them zeroed anew: a twentieth of a step on CPUs.
    """
    import torch

    if threads:
        torch.set_num_threads(threads)
    if libc := _glibc():
        libc.mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, TRIM_BYTES)


def trim() -> None:
    """Give freed memory back after all: tensors of many sizes that come and go leave holes that the next ones do not fit in."""
    if libc := _glibc():
        libc.malloc_trim(0)


def _glibc() -> Any:
    return ctypes.CDLL(None) if sys.platform == "linux" and platform.libc_ver()[0] == "glibc" else None


def here() -> tuple[str, int]:
    """This process's address among the nodes, and a free port."""
    return address(), free_port()


def address() -> str:
    """By which the other processes of the run reach this one; where Ray has not started it there are none elsewhere."""
    ray: Any = sys.modules.get("ray")  # not imported for this
    return ray.util.get_node_ip_address() if ray is not None and ray.is_initialized() else "127.0.0.1"


def free_port() -> int:
    """One that nothing uses, from below those that Linux gives to whoever asks for any: none of these takes it before its user does.

    Raises OSError when none is free.
    """
    first = random.SystemRandom().randrange(len(FREE_PORTS))
    for port in [*FREE_PORTS[first:], *FREE_PORTS[:first]]:
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    raise OSError(f"no port of {FREE_PORTS.start} to {FREE_PORTS.stop - 1} is free on this machine")
