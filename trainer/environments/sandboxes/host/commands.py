"""Commands of a sandbox: what a forked process does before it becomes one, and work on files that is done as a command would do it."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import signal
import stat
import sys
import tarfile
from collections.abc import Callable
from typing import Any

from . import kernel

STATE, LEFT = 9, 8  # descriptors that a shell reads its variables from, and where it leaves its folder and them
# The shell that runs a command begins where the last one ended: in its folder, with its exported variables.
SHELL = f"""{{ . /dev/fd/{STATE}; }} 2>/dev/null
exec {STATE}<&-
trap '__code=$?; {{ pwd; printf "\\000"; export -p; }} >&{LEFT} 2>/dev/null; exit $__code' EXIT
__command=$1; shift; eval "$__command"
"""

DESCRIPTORS = 1 << 16  # more than any process of ours has


def _fresh_process(stdin: int, stdout: int, stderr: int) -> None:
    os.setsid()
    for signum in (signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(signum, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    for target, fd in enumerate((stdin, stdout, stderr)):
        os.dup2(fd, target)


def _expendable() -> None:
    """The kernel is to end this process when memory is short, before the first one, whose end is the sandbox's. To be called when there is
    nothing left that somebody who traces this process could use: it is open to that for a moment."""
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("800")
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)


def become(argv: list[str], env: dict[str, str], folders: list[str], streams: tuple[int, int, int], state: tuple[int, int]) -> None:
    """In a forked process; in the first of the folders that is there. Does not return."""
    try:
        _fresh_process(*streams)
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, STATE + 1) for fd in state]
        for fd, target in zip(high, (STATE, LEFT), strict=True):
            os.dup2(fd, target)
        os.closerange(3, LEFT)
        os.closerange(STATE + 1, DESCRIPTORS)
        kernel.keep_capabilities(())
        _expendable()
        for folder in folders:
            with contextlib.suppress(OSError):
                os.chdir(folder)
                break
        os.execvpe(argv[0], argv, env)
    except BaseException as error:
        os.write(2, f"{getattr(error, 'strerror', None) or error}: {argv[0]}\n".encode(errors="replace"))
    finally:
        os._exit(127)


def work(function: Callable[[], None], stdin: int, stdout: int, stderr: int, keep: int = -1) -> None:
    """In a forked process. It has no capabilities and no other descriptors, unless it keeps one of them and what it can read with them.
    Does not return."""
    code = 1
    try:
        _fresh_process(stdin, stdout, stderr)
        if keep < 0:
            kernel.keep_capabilities(())
            os.closerange(3, DESCRIPTORS)
            _expendable()
        function()
        code = 0
    except Exception as error:
        with contextlib.suppress(OSError):
            name = getattr(error, "filename", None)
            text = getattr(error, "strerror", None) or str(error) or type(error).__name__
            os.write(2, f"{name}: {text}".encode(errors="replace") if name else text.encode(errors="replace"))
    finally:
        os._exit(code)


def read(path: str, most: int) -> Callable[[], None]:
    def function() -> None:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        kind = os.fstat(fd)
        if not stat.S_ISREG(kind.st_mode):
            raise OSError(f"{path}: is no regular file")
        left = most + 1
        while left > 0 and (data := os.read(fd, min(left, 1 << 16))):
            left -= len(data)
            _write_all(1, data)
        if left <= 0:
            raise OSError(f"{path}: has {kind.st_size} bytes; at most {most} are read")

    return function


def write(path: str, mode: int | None) -> Callable[[], None]:
    """What stands on standard input; folders above are made."""

    def function() -> None:
        os.makedirs(os.path.dirname(path) or "/", exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_NOCTTY, 0o644)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(f"{path}: is no regular file")
        while data := os.read(0, 1 << 20):
            _write_all(fd, data)
        if mode is not None:
            os.fchmod(fd, mode)

    return function


def unpack(folder: str) -> Callable[[], None]:
    """A tar archive on standard input. It comes from outside, and may only lead to what lies below `folder`."""

    def function() -> None:
        os.makedirs(folder, exist_ok=True)
        real = os.path.realpath(folder)
        with open(0, "rb", closefd=False) as source, tarfile.open(fileobj=source, mode="r:") as archive:
            for member in archive:
                target = os.path.realpath(os.path.join(real, os.path.dirname(member.name)))
                parts = member.name.split("/")
                if member.name.startswith("/") or ".." in parts or os.path.commonpath([real, target]) != real:
                    raise OSError(f"{member.name}: leads out of {folder}")
                if member.isdev():
                    raise OSError(f"{member.name}: is a device")
                if member.islnk() and (member.linkname.startswith("/") or ".." in member.linkname.split("/")):
                    raise OSError(f"{member.name}: links to {member.linkname}, out of {folder}")
                member.uid = member.gid = 0
                archive.extract(member, real, set_attrs=not member.issym(), numeric_owner=True, **TRUSTED)

    return function


# What it is given has been looked at above; the argument is there since 3.10.12 and 3.11.4.
TRUSTED: dict[str, Any] = {"filter": "fully_trusted"} if hasattr(tarfile, "fully_trusted_filter") else {}


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def snapshot(upper: int) -> Callable[[], None]:
    """All that was written, as a tar archive on standard output: also what an overlay marks as deleted. Needs to read all files."""

    def function() -> None:
        os.fchdir(upper)
        os.chroot(".")
        with open(1, "wb", closefd=False) as target, tarfile.open(fileobj=target, mode="w|", format=tarfile.PAX_FORMAT) as archive:
            for folder, names, files in os.walk("/", followlinks=False):
                for name in sorted([*names, *files]):
                    path = os.path.join(folder, name)
                    if stat.S_ISSOCK(os.lstat(path).st_mode):
                        continue
                    member = archive.gettarinfo(path, arcname=path.lstrip("/"))
                    if member.isdir() and os.path.ismount(path):
                        continue
                    with contextlib.suppress(OSError):
                        opaque = os.getxattr(path, "user.overlay.opaque", follow_symlinks=False)
                        member.pax_headers = {"FLOTILLA.opaque": opaque.decode()}
                    with open(path, "rb") if member.isreg() else io.BytesIO() as content:
                        archive.addfile(member, content if member.isreg() else None)
                names.sort()

    return function


def restore(upper: int, archive_fd: int) -> None:
    """What `snapshot` wrote, into a disk that is still empty of it; in a forked process, whose root the disk becomes."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.fchdir(upper)
            os.chroot(".")
            with open(archive_fd, "rb", closefd=False) as source, tarfile.open(fileobj=source, mode="r|") as archive:
                for member in archive:
                    if os.path.lexists(f"/{member.name}") and not member.isdir():
                        os.unlink(f"/{member.name}")
                    archive.extract(member, "/", numeric_owner=True, **TRUSTED)
                    if opaque := member.pax_headers.get("FLOTILLA.opaque"):
                        os.setxattr(f"/{member.name}", "user.overlay.opaque", opaque.encode())
            code = 0
        except Exception as error:
            sys.stderr.write(f"sandbox: snapshot: {error}\n")
            sys.stderr.flush()
        finally:
            os._exit(code)
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
        raise OSError("the snapshot could not be unpacked; the disk may be smaller than the one it was taken of (disk_mb)")
