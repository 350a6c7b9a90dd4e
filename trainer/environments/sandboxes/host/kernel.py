"""Calls of Linux that Python has no function for. Each raises OSError that names the call."""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import signal
import socket
import struct

LIBC = ctypes.CDLL(None, use_errno=True)
NUMBERS = {  # of system calls that glibc has no function for
    "x86_64": {"clone": 56, "pivot_root": 155, "capset": 126, "mount_setattr": 442},
    "aarch64": {"clone": 220, "pivot_root": 41, "capset": 91, "mount_setattr": 442},
}
MACHINE = platform.machine()

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
NAMESPACES = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_SECUREBITS, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 28, 38
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1
CAP_DAC_OVERRIDE, CAP_CHOWN, CAP_FOWNER, CAP_KILL, CAP_SYS_CHROOT, LAST_CAP = 1, 0, 3, 5, 18, 63


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _call(name: str, *args: object) -> int:
    return _check(LIBC.syscall(ctypes.c_long(NUMBERS[MACHINE][name]), *args), name)


def clone(flags: int) -> int:
    """fork() with new namespaces. For processes with one thread."""
    zero = ctypes.c_long(0)
    pid = _call("clone", ctypes.c_ulong(flags | signal.SIGCHLD), zero, zero, zero, zero)
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    return pid


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    result = LIBC.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode() or None)
    _check(result, f"mount {kind or source} at {target}")


def bind(source: str, target: str, *, writable: bool = False, devices: bool = False) -> None:
    """With all that is mounted below it."""
    mount(source, target, flags=MS_BIND | MS_REC)
    flags = MS_NOSUID | (0 if writable else MS_RDONLY) | (0 if devices else MS_NODEV)
    try:
        attributes = struct.pack("QQQQ", flags, 0, 0, 0)  # of struct mount_attr; these flags have the same values there
        _call("mount_setattr", AT_FDCWD, target.encode(), AT_RECURSIVE, attributes, ctypes.c_size_t(len(attributes)))
    except OSError:  # before Linux 5.12: the mount itself alone, with the flags that it must keep
        kept = os.statvfs(target).f_flag & (MS_NOSUID | MS_NODEV | MS_NOEXEC | 0x2C00)
        mount("none", target, flags=MS_REMOUNT | MS_BIND | flags | kept)


def pivot_root(new: str, old: str) -> None:
    _call("pivot_root", new.encode(), old.encode())


def unmount(target: str) -> None:
    _check(LIBC.umount2(target.encode(), MNT_DETACH), f"unmount {target}")


def prctl(option: int, value: object = 0, third: object = 0) -> None:
    zero = ctypes.c_ulong(0)
    second = ctypes.c_ulong(value) if isinstance(value, int) else value
    _check(LIBC.prctl(option, second, third if third else zero, zero, zero), f"prctl {option}")


def die_with_parent() -> None:
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def keep_capabilities(kept: tuple[int, ...]) -> None:
    """Of this process; what it executes has none, whatever user it is."""
    mask = sum(1 << cap for cap in kept)
    header = struct.pack("Ii", 0x20080522, 0)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    _call("capset", header, struct.pack("IIIIII", low, low, 0, high, high, 0))


def drop_bounding_set() -> None:
    for cap in range(LAST_CAP + 1):
        if LIBC.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(cap), 0, 0, 0) < 0:
            break  # past the last one of this kernel


def loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack("16xH14x", fcntl.ioctl(any_socket, SIOCGIFFLAGS, request))[0]
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | IFF_UP))
