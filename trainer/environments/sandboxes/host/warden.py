"""The process beside an owner of sandboxes that makes them and ends them: they die with it, and it with its owner.

It reads messages on standard input, which is a socket: `create` (with the sandbox's own socket as a descriptor), `end`, `look`.
It answers on the same socket: `hello` with what this machine can do, `ended` for each sandbox, `looked`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import shutil
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import frames, inside, kernel, limits

# As root, sandboxes are somebody who owns nothing on the machine; otherwise they are the user who made them.
SANDBOX_USER = 0x5F000000
REAP_EVERY = 10.0  # seconds, for groups that a dead warden left
GROUP_SECONDS = 10.0  # within which the kernel takes what was killed out of a group


@dataclass
class Box:
    name: str
    pid: int
    group: limits.Group
    until: float | None = None  # its processes have ended, and its group is to be gone by then
    reason: str = ""
    killed: int = 0  # processes, by its memory limit
    refused: int = 0  # processes, by their number

    def kill(self) -> None:
        if self.until is None:  # else its number may be another process's by now
            os.kill(self.pid, signal.SIGKILL)


class Warden:
    def __init__(self, owner: socket.socket):
        self.owner = owner
        self.groups = limits.found()
        self.boxes: dict[str, Box] = {}
        self.reaped_at = 0.0

    def serve(self) -> None:
        wake, wake_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self.owner, select.POLLIN)
        poll.register(wake, select.POLLIN)
        frames.send(self.owner, {"hello": sorted(self.groups.kinds), "root": os.geteuid() == 0})
        while True:
            leaving = any(box.until is not None for box in self.boxes.values())
            for fd, _ in poll.poll(20 if leaving else REAP_EVERY * 1000):
                if fd == self.owner.fileno():
                    self._do(*frames.receive(self.owner))
                else:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake, 4096)
            self._reap()
            if time.monotonic() - self.reaped_at > REAP_EVERY:
                limits.reap(self.groups)
                self.reaped_at = time.monotonic()

    def _do(self, message: dict[str, Any], body: bytes, fds: list[int]) -> None:
        name = message["name"]
        try:
            if message["do"] == "create":
                self._create(name, message["spec"], fds)
            elif box := self.boxes.get(name):
                if message["do"] == "end":
                    box.kill()
                elif message["do"] == "look":
                    frames.send(self.owner, {"looked": name, "killed": box.group.killed()})
            elif message["do"] == "look":
                frames.send(self.owner, {"looked": name, "killed": 0})
        except OSError as error:
            frames.send(self.owner, {"ended": name, "why": explained(error)})
        finally:
            for fd in fds:
                os.close(fd)

    def _create(self, name: str, spec: dict[str, Any], fds: list[int]) -> None:
        group = limits.Group(self.groups, name)
        go, go_end = os.pipe2(os.O_CLOEXEC)
        try:
            group.make(spec["memory_mb"] << 20, spec["processes"], spec["cpu"])
            pid = kernel.clone(kernel.NAMESPACES)
        except OSError:
            group.remove()
            os.close(go)
            os.close(go_end)
            raise
        if pid == 0:
            self._child(spec, fds, go, go_end)
        os.close(go)
        self.boxes[name] = Box(name, pid, group)
        try:
            group.add(pid)
            self._map(pid)
            if spec["cpus"]:
                os.sched_setaffinity(pid, spec["cpus"])
            os.write(go_end, b"go")
        except OSError:
            os.kill(pid, signal.SIGKILL)
            raise
        finally:
            os.close(go_end)

    def _child(self, spec: dict[str, Any], fds: list[int], go: int, go_end: int) -> None:
        """Does not return."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for signum in (
                signal.SIGTERM,
                signal.SIGHUP,
                signal.SIGINT,
                signal.SIGCHLD,
            ):
                signal.signal(signum, signal.SIG_DFL)
            os.close(go_end)
            channel = socket.socket(fileno=os.dup(fds[0]))
            kept = {go, channel.fileno(), 0, 1, 2}
            null = os.open("/dev/null", os.O_RDWR)
            for target in (0, 1):  # standard input was the owner's socket
                os.dup2(null, target)
            for fd in [int(each) for each in os.listdir("/proc/self/fd")]:
                if fd not in kept:
                    with contextlib.suppress(OSError):
                        os.close(fd)
            if os.read(go, 2) == b"go":
                os.close(go)
                inside.begin(channel, spec)
            code = 0
        except BaseException as error:
            sys.stderr.write(f"sandbox: {type(error).__name__}: {error}\n")
            sys.stderr.flush()
        finally:
            os._exit(code)

    def _map(self, pid: int) -> None:
        user, group = (SANDBOX_USER, SANDBOX_USER) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
        if os.geteuid() != 0:
            Path(f"/proc/{pid}/setgroups").write_text("deny")
        Path(f"/proc/{pid}/uid_map").write_text(f"0 {user} 1")
        Path(f"/proc/{pid}/gid_map").write_text(f"0 {group} 1")

    def _reap(self) -> None:
        ended: dict[int, int] = {}
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                ended[found[0]] = os.waitstatus_to_exitcode(found[1])
        now = time.monotonic()
        for box in self.boxes.values():
            if box.pid in ended:
                box.killed, box.refused = box.group.killed(), box.group.refused()
                killed = ended[box.pid] == -signal.SIGKILL and box.killed
                box.reason = "its first process was ended, as memory was short" if killed else ""
                box.until = now + GROUP_SECONDS
        gone = [box for box in self.boxes.values() if box.until is not None and (box.group.remove() or now > box.until)]
        for box in gone:
            del self.boxes[box.name]
        for box in gone:
            frames.send(self.owner, {"ended": box.name, "why": box.reason, "killed": box.killed, "refused": box.refused})

    def close(self) -> None:
        for box in self.boxes.values():
            with contextlib.suppress(OSError):
                box.kill()
        until = time.monotonic() + GROUP_SECONDS
        while self.boxes and time.monotonic() < until:
            with contextlib.suppress(frames.Closed):
                self._reap()
            time.sleep(0.01)


def explained(error: OSError) -> str:
    """With what helps, where that is known."""
    text = f"{error.strerror or error}"
    if text.startswith("clone"):
        if error.errno in (errno.EPERM, errno.EACCES):
            return f"{text}: users may not create namespaces on this machine; {advice()}"
        if error.errno == errno.ENOSPC:
            return f"{text}: no more namespaces; raise the sysctl user.max_user_namespaces and its kin"
        if error.errno == errno.EINVAL:
            return f"{text}: this kernel has no user namespaces"
    return text


def advice() -> str:
    for sysctl, value in (("kernel.apparmor_restrict_unprivileged_userns", 0), ("kernel.unprivileged_userns_clone", 1)):
        path = Path("/proc/sys") / sysctl.replace(".", "/")
        if path.exists() and path.read_text().strip() != str(value):
            return f"sudo sysctl {sysctl}={value}"
    return "in a container, allow them by its options: --security-opt seccomp=unconfined --security-opt systempaths=unconfined"


def main() -> int:
    owner = socket.socket(fileno=os.dup(0))
    os.umask(0o022)
    os.chdir("/")
    warden = Warden(owner)
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda *_: sys.exit(0))
    try:
        warden.serve()
    except frames.Closed:
        pass
    finally:
        warden.close()
        for folder in sys.argv[1:]:  # of the owner's snapshots, which cannot remove it where it was killed
            shutil.rmtree(folder, ignore_errors=True)
    return 0
