"""What a sandbox sees as its file system: this machine's programs, or a folder with a system of its own, read-only; over it a disk in
memory, of a size, that alone is written to."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import kernel
from .commands import restore

PLACE = "/tmp"  # of the host, which has it always; hidden from this process by what is mounted there
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
PROGRAMS = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
# Of /etc: what programs need to start, and nothing that says who this machine is.
OF_ETC = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "magic", "mime.types", "python3", "ssl/certs")
ETC = {
    "passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": "root:x:0:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "resolv.conf": "",
}
# Of /proc: what tells of the whole machine or acts on it. Folders are shown empty, files as /dev/null.
HIDDEN = ("acpi", "asound", "bus", "fs", "irq", "kcore", "keys", "key-users", "kmsg", "kpagecount", "kpageflags", "latency_stats", "mdstat")
HIDDEN += ("modules", "sched_debug", "scsi", "sysrq-trigger", "sysvipc", "timer_list", "vmallocinfo", "zoneinfo")
SHARED_MEMORY_MB = 64
MINIMAL_INODES = 4096
INODES_PER_MB = 256


@dataclass
class Layout:
    """With descriptors, as paths may not be visible any more once the layout is made."""

    lower: int | None  # the system; None: this machine's programs
    folders: list[tuple[int, str]]  # shown at these paths, read-only
    disk_mb: int
    workdir: str
    snapshot: int | None = None  # a file that commands.snapshot wrote

    def close(self) -> None:
        for fd in (self.lower, self.snapshot, *(fd for fd, _ in self.folders)):
            if fd is not None:
                os.close(fd)


def build(layout: Layout) -> int:
    """Make it this process's root. Returns a descriptor of the folder that holds what will be written. Raises OSError."""
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    devices = {name: os.open(f"/dev/{name}", os.O_PATH | os.O_CLOEXEC) for name in DEVICES}
    programs, etc = ({}, {}) if layout.lower is not None else (_opened("/", PROGRAMS), _opened("/etc", OF_ETC))
    quiet = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("tmpfs", PLACE, "tmpfs", quiet, "size=1m,mode=755")
    disk, root = f"{PLACE}/disk", f"{PLACE}/root"
    for folder in (disk, root):
        os.mkdir(folder)
    inodes = max(MINIMAL_INODES, layout.disk_mb * INODES_PER_MB)
    kernel.mount("tmpfs", disk, "tmpfs", quiet, f"size={layout.disk_mb}m,nr_inodes={inodes},mode=755")
    upper = f"{disk}/upper"
    os.mkdir(upper)
    written = os.open(upper, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    if layout.snapshot is not None:
        restore(written, layout.snapshot)
    if layout.lower is None:
        kernel.bind(upper, root, writable=True)
        _own_system(root, programs, etc)
    else:
        os.mkdir(f"{disk}/work")
        options = f"lowerdir=/proc/self/fd/{layout.lower},upperdir={upper},workdir={disk}/work,userxattr"
        kernel.mount("overlay", root, "overlay", quiet, options)
    _common(root, devices, layout)
    os.chdir(root)
    kernel.pivot_root(".", ".")
    kernel.unmount(".")
    os.chdir("/")
    for fd in (*devices.values(), *programs.values(), *etc.values()):
        if isinstance(fd, int):
            os.close(fd)
    with contextlib.suppress(OSError):
        socket.sethostname("sandbox")
    return written


def _opened(below: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Descriptors, or the target of a link such as /bin."""
    found: dict[str, Any] = {}
    for name in names:
        path = os.path.join(below, name)
        if os.path.islink(path) and below == "/":
            found[name] = os.readlink(path)
        elif os.path.exists(path):
            with contextlib.suppress(OSError):
                found[name] = os.open(path, os.O_PATH | os.O_CLOEXEC)
    return found


def _own_system(root: str, programs: dict[str, Any], etc: dict[str, Any]) -> None:
    for name, what in programs.items():
        if not isinstance(what, str):
            _show(what, root, name)
        elif not os.path.lexists(f"{root}/{name}"):
            os.symlink(what, f"{root}/{name}")
    folder = _inside(root, "etc")
    os.makedirs(folder, exist_ok=True)
    for name, text in ETC.items():
        if not os.path.lexists(f"{folder}/{name}"):
            Path(f"{folder}/{name}").write_text(text)
    for name, fd in etc.items():
        _show(fd, root, f"etc/{name}")


def _show(fd: int, root: str, path: str, **how: bool) -> None:
    """What a descriptor is of, at a path of the sandbox, read-only."""
    source, target = f"/proc/self/fd/{fd}", _inside(root, path)
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "a"):
            pass
    kernel.bind(source, target, **how)


def _common(root: str, devices: dict[str, int], layout: Layout) -> None:
    """A system may come with links in place of these folders, which would lead out of it while it is not yet the root."""
    for name, mode in (("proc", 0o555), ("dev", 0o755), ("tmp", 0o1777), ("root", 0o700), ("run", 0o755)):
        path = f"{root}/{name}"
        if os.path.islink(path):
            os.unlink(path)
        os.makedirs(path, exist_ok=True)
        with contextlib.suppress(OSError):  # of a system whose files belong to somebody else
            os.chmod(path, mode)
    quiet = kernel.MS_NOSUID | kernel.MS_NODEV
    dev = f"{root}/dev"
    kernel.mount("tmpfs", dev, "tmpfs", kernel.MS_NOSUID, "size=256k,mode=755")
    for name, fd in devices.items():
        _show(fd, root, f"dev/{name}", writable=True, devices=True)
    for name, target in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2"), ("ptmx", "pts/ptmx")):
        os.symlink(target, f"{dev}/{name}")
    for name in ("pts", "shm"):
        os.mkdir(f"{dev}/{name}")
    kernel.mount("devpts", f"{dev}/pts", "devpts", kernel.MS_NOSUID | kernel.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620")
    kernel.mount("tmpfs", f"{dev}/shm", "tmpfs", quiet, f"size={SHARED_MEMORY_MB}m,mode=1777")
    kernel.mount("none", dev, flags=kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID)
    proc = f"{root}/proc"
    kernel.mount("proc", proc, "proc", quiet | kernel.MS_NOEXEC)
    for name in HIDDEN:
        path = f"{proc}/{name}"
        if os.path.isdir(path):
            kernel.mount("tmpfs", path, "tmpfs", quiet | kernel.MS_RDONLY, "size=4k,mode=555")
        elif os.path.exists(path):
            kernel.bind(f"{dev}/null", path, devices=True)
    kernel.bind(f"{proc}/sys", f"{proc}/sys")
    for fd, target in layout.folders:
        _show(fd, root, target)
    os.makedirs(_inside(root, layout.workdir), exist_ok=True)


def _inside(root: str, path: str) -> str:
    """Where a path of the sandbox lies while it is not yet the root; no link of its system leads out."""
    found = os.path.realpath(root)
    for part in path.strip("/").split("/"):
        following = f"{found}/{part}"
        if os.path.islink(following):
            raise OSError(f"{path}: {following.removeprefix(root)} is a link; give a path without links")
        found = following
    return found
