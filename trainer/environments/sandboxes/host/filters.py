"""The system calls that commands of a sandbox are refused, as a program of seccomp: what reaches the kernel's own keys, modules and
tracing, what makes namespaces and mounts, and families of sockets that network namespaces do not hold back."""

from __future__ import annotations

import ctypes
import errno
import socket
import struct

from . import kernel

# name: (x86_64, aarch64); None where it has no such call
REFUSED: dict[str, tuple[int | None, int | None]] = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "clock_settime": (227, 112),
    "delete_module": (176, 106),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "lookup_dcookie": (212, 18),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "pivot_root": (155, 41),
    "quotactl": (179, 60),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "vmsplice": (278, 75),
}
CLONE, CLONE3, SOCKET, IOCTL, AFFINITY = (56, 220), (435, 435), (41, 198), (16, 29), (203, 122)
NEW = kernel.NAMESPACES | kernel.CLONE_NEWCGROUP | 0x80  # CLONE_NEWTIME
FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, 16)  # AF_NETLINK: of its own network namespace
INJECT = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX: typing into another one's terminal
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32 = 0x40000000

LOAD, EQUAL, SET, AT_LEAST, RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
ALLOW, KILL, ERROR = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER, ARCHITECTURE, ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data; low half of the first argument, the others 8 further each


def program(machine: str, *, pin_cpus: bool = False) -> bytes:
    """`pin_cpus`: also refuse to choose other CPUs. Raises KeyError for a machine whose numbers are not known here."""
    at = {"x86_64": 0, "aarch64": 1}[machine]
    refuse, missing = [(RETURN, 0, 0, ERROR | errno.EPERM)], [(RETURN, 0, 0, ERROR | errno.ENOSYS)]
    found = [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, ARCHITECTURES[machine]), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER)]
    if machine == "x86_64":
        found += [(AT_LEAST, 0, 1, X32), *missing]
    for number in [each[at] for each in REFUSED.values()] + ([AFFINITY[at]] if pin_cpus else []):
        if number is not None:
            found += [(EQUAL, 0, 1, number), *refuse]
    found += [(EQUAL, 0, 1, CLONE3[at]), *missing]  # its flags are in memory, where this cannot look; callers fall back to clone
    found += [(EQUAL, 0, 4, CLONE[at]), (LOAD, 0, 0, ARGUMENT), (SET, 0, 1, NEW), *refuse, (RETURN, 0, 0, ALLOW)]
    found += [(EQUAL, 0, 3 + len(FAMILIES), SOCKET[at]), (LOAD, 0, 0, ARGUMENT)]
    found += [(EQUAL, len(FAMILIES) - i, 0, family) for i, family in enumerate(FAMILIES)] + [*refuse, (RETURN, 0, 0, ALLOW)]
    found += [(EQUAL, 0, 5, IOCTL[at]), (LOAD, 0, 0, ARGUMENT + 8), (EQUAL, 1, 0, INJECT[0]), (EQUAL, 0, 1, INJECT[1]), *refuse]
    found += [(RETURN, 0, 0, ALLOW)]
    found += [(RETURN, 0, 0, ALLOW)]
    return b"".join(struct.pack("HBBI", *each) for each in found)


def install(filters: bytes) -> None:
    """For this process and all that it starts, for good. Needs PR_SET_NO_NEW_PRIVS."""
    code = ctypes.create_string_buffer(filters, len(filters))
    pointer = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(filters) // 8, ctypes.addressof(code)))
    kernel.prctl(kernel.PR_SET_SECCOMP, kernel.SECCOMP_MODE_FILTER, pointer)
