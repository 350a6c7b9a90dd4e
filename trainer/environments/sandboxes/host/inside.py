"""The first process of a sandbox: it makes what the sandbox sees, gives up its rights, runs commands, and reaps what they leave.

It speaks over one socket with whoever owns the sandbox, and ends, and all with it, when that is closed. What owners send: exec, read,
write, unpack, snapshot, kill; each has an id, and is answered by `out` and `err` with bytes, and at last by `done`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import select
import signal
import socket
import time
from dataclasses import dataclass, field
from typing import Any

from . import commands, filters, frames, kernel, layout

PIECE = 1 << 16
MOST_STATE = 1 << 20  # bytes of a shell's folder and variables
DRAIN_SECONDS = 0.2  # for output of a command that has ended while what it left behind still holds its streams
ROOM_SECONDS = 5.0  # until processes that were ended have given up their places
MOST_COMMANDS = 64  # at a time


@dataclass
class Running:
    name: int
    pid: int
    streams: dict[int, str]  # descriptors: out, err
    left: int  # of the output's bytes that may still be sent
    deadline: float
    began: float
    leaves: int  # the descriptor at which its shell leaves its state
    session: str
    left_out: int = 0
    late: bool = False
    code: int | None = None
    until: float = 0.0  # once it has ended
    state: bytearray = field(default_factory=bytearray)


@dataclass
class Session:
    """What a shell left for the next one."""

    cwd: str
    variables: bytes = b""


class Init:
    def __init__(self, channel: socket.socket, spec: dict[str, Any], upper: int):
        self.channel, self.spec, self.upper = channel, spec, upper
        self.running: dict[int, Running] = {}
        self.sessions: dict[str, Session] = {}
        self.listeners: dict[int, tuple[socket.socket, int]] = {}
        self.poll = select.poll()
        self.shell = next((path for path in ("/bin/bash", "/usr/bin/bash") if os.path.exists(path)), "/bin/sh")
        self.wake, wake_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
        for fd in (self.wake, channel.fileno()):
            self.poll.register(fd, select.POLLIN)
        for port in spec["ports"]:
            listener = socket.create_server(("127.0.0.1", port), backlog=64)
            listener.setblocking(False)
            self.listeners[listener.fileno()] = (listener, port)
            self.poll.register(listener.fileno(), select.POLLIN)

    def serve(self) -> None:
        while True:
            now = time.monotonic()
            nearest = min((each.until or each.deadline for each in self.running.values()), default=now + 3600)
            for fd, event in self.poll.poll(max(0.0, nearest - now) * 1000 + 1):
                if fd == self.channel.fileno():
                    message, body, fds = frames.receive(self.channel)
                    for each in fds:  # none is expected
                        os.close(each)
                    self._do(message, body)
                elif fd == self.wake:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self.wake, PIECE)
                elif fd in self.listeners:
                    self._accept(*self.listeners[fd])
                else:
                    self._output(fd, event)
            self._reap()
            self._look()

    def _do(self, message: dict[str, Any], body: bytes) -> None:
        kind, name = message["do"], message["id"]
        if kind == "kill":
            for each in self.running.values():
                if each.name == message["of"]:
                    _end(each.pid)
            return
        try:
            if len(self.running) >= MOST_COMMANDS:
                raise OSError(f"{MOST_COMMANDS} commands run already")
            self._start(kind, name, message, body)
        except OSError as error:
            frames.send(self.channel, {"done": name, "code": 126, "why": f"sandbox: {error.strerror or error}"})

    def _start(self, kind: str, name: int, message: dict[str, Any], body: bytes) -> None:
        session = self.sessions.setdefault(message.get("session", ""), Session(self.spec["workdir"]))
        opened: list[int] = []
        try:
            given = _file(body, opened)
            out, out_end = _pipe(opened)
            err, err_end = _pipe(opened)
            leaves, leave_end = _pipe(opened)
            state = _file(session.variables, opened)
            if (pid := self._fork()) == 0:
                self._forked(kind, message, session, (given, out_end, err_end), (state, leave_end))
        except OSError:
            for fd in opened:
                os.close(fd)
            raise
        mine = {out: "out", err: "err"}
        for fd in opened:
            if fd not in (out, err, leaves):
                os.close(fd)
        now = time.monotonic()
        self.running[pid] = Running(name, pid, mine, message["most"], now + message["seconds"], now, leaves, message.get("session", ""))
        for fd in (out, err, leaves):
            os.set_blocking(fd, False)
        for fd in mine:
            self.poll.register(fd, select.POLLIN)

    def _forked(self, kind: str, message: dict[str, Any], session: Session, ends: tuple[int, int, int], state: tuple[int, int]) -> None:
        """Does not return."""
        if kind == "exec":
            argv = [self.shell, "-c", commands.SHELL, "sh", *message["argv"]]
            folders = [*([message["cwd"]] if message["cwd"] else []), session.cwd, self.spec["workdir"], "/"]
            commands.become(argv, {**self.spec["env"], **message["env"]}, folders, ends, state)
        if kind == "snapshot":
            commands.work(commands.snapshot(self.upper), *ends, keep=self.upper)
        path = os.path.join(session.cwd, message["path"])
        if kind == "read":
            commands.work(commands.read(path, message["size"]), *ends)
        elif kind == "write":
            commands.work(commands.write(path, message["mode"]), *ends)
        elif kind == "unpack":
            commands.work(commands.unpack(path), *ends)
        os._exit(125)

    def _fork(self) -> int:
        """What runs in the background may have taken all processes that there may be; a command takes precedence over it."""
        try:
            return os.fork()
        except BlockingIOError:
            if self.running:
                raise
            with contextlib.suppress(OSError):
                os.kill(-1, signal.SIGKILL)
            until = time.monotonic() + ROOM_SECONDS
            while time.monotonic() < until:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(-1, os.WNOHANG)
                with contextlib.suppress(BlockingIOError):
                    return os.fork()
            raise

    def _output(self, fd: int, event: int) -> None:
        running = next((each for each in self.running.values() if fd in each.streams), None)
        if running is None:
            self.poll.unregister(fd)
            return
        self._read(running, fd)

    def _read(self, running: Running, fd: int) -> bool:
        """Whether there was anything."""
        try:
            data = os.read(fd, PIECE)
        except BlockingIOError:
            return False
        if not data:
            self._forget(running, fd)
            return False
        kept = data[: running.left]
        running.left -= len(kept)
        running.left_out += len(data) - len(kept)
        if kept:
            frames.send(self.channel, {running.streams[fd]: running.name}, kept)
        return True

    def _forget(self, running: Running, fd: int) -> None:
        self.poll.unregister(fd)
        del running.streams[fd]
        os.close(fd)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if running := self.running.get(pid):
                running.code = os.waitstatus_to_exitcode(status)
                running.until = time.monotonic() + DRAIN_SECONDS

    def _look(self) -> None:
        """End what is late, and report what has ended, once its streams are at their ends or nothing more comes."""
        now = time.monotonic()
        for running in list(self.running.values()):
            if running.code is None and now >= running.deadline:
                running.late, running.deadline = True, now + 3600
                _end(running.pid)
            if running.code is not None:
                for fd in list(running.streams):
                    while fd in running.streams and now < running.until and self._read(running, fd):
                        now = time.monotonic()
                if not running.streams or not _held(running.pid) or now >= running.until:
                    self._finish(running)

    def _finish(self, running: Running) -> None:
        for fd in list(running.streams):
            self._forget(running, fd)
        with contextlib.suppress(BlockingIOError):
            while len(running.state) <= MOST_STATE and (data := os.read(running.leaves, PIECE)):
                running.state += data
        os.close(running.leaves)
        cwd, mark, variables = bytes(running.state).partition(b"\n\0")
        if mark and len(running.state) <= MOST_STATE:
            self.sessions[running.session] = Session(os.fsdecode(cwd), variables)
        del self.running[running.pid]
        seconds = time.monotonic() - running.began
        done = {"done": running.name, "code": running.code, "seconds": seconds, "late": running.late, "left_out": running.left_out}
        frames.send(self.channel, done)

    def _accept(self, listener: socket.socket, port: int) -> None:
        """The connection goes to the sandbox's owner, who knows where it leads."""
        with contextlib.suppress(BlockingIOError):
            connection, _ = listener.accept()
            with connection:
                frames.send(self.channel, {"port": port}, fds=[connection.fileno()])


def _file(data: bytes, opened: list[int]) -> int:
    fd = os.memfd_create("given", os.MFD_CLOEXEC)
    opened.append(fd)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _pipe(opened: list[int]) -> tuple[int, int]:
    both = os.pipe2(os.O_CLOEXEC)
    opened += both
    return both


def _held(group: int) -> bool:
    """Whether processes of a command that has ended still run."""
    try:
        os.killpg(group, 0)
    except OSError as error:
        return error.errno != errno.ESRCH
    return True


def _end(pid: int) -> None:
    """A command, its group, and all others of its session. What made a session of its own goes on, as servers do."""
    for _ in range(8):
        found = _session(pid)
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)
        for each in found:
            with contextlib.suppress(OSError):
                os.kill(each, signal.SIGKILL)
        if not found:
            return


def _session(pid: int) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
                state, _, _, session = file.read().rpartition(")")[2].split()[:4]
                if int(session) == pid and state not in "ZX":
                    found.append(int(name))
    return found


def begin(channel: socket.socket, spec: dict[str, Any]) -> None:
    """In the new process, once its user is mapped. Returns when the owner has gone."""
    try:
        given = layout.Layout(  # while this is still the user who made it, and may see them
            _opened(spec["lower"]) if spec["lower"] else None,
            [(_opened(source), path) for source, path in spec["folders"]],
            spec["disk_mb"],
            spec["workdir"],
            os.open(spec["snapshot"], os.O_RDONLY | os.O_CLOEXEC) if spec["snapshot"] else None,
        )
        with contextlib.suppress(OSError):  # an ordinary user keeps its groups, which are mapped to nobody
            os.setgroups([])
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
        kernel.die_with_parent()
        if given.lower is not None and not os.access(f"/proc/self/fd/{given.lower}", os.R_OK | os.X_OK):
            raise OSError(f"{spec['lower']}: others must be able to read it and what is in it: chmod -R o+rX")
        kernel.LIBC.unshare(kernel.CLONE_NEWCGROUP)
        kernel.loopback_up()
        upper = layout.build(given)
        given.close()
        for name, value in spec["rlimits"].items():
            resource.setrlimit(getattr(resource, name), (value, value))
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        kernel.drop_bounding_set()
        kernel.keep_capabilities((kernel.CAP_DAC_OVERRIDE, kernel.CAP_FOWNER, kernel.CAP_KILL, kernel.CAP_SYS_CHROOT))
        filters.install(filters.program(kernel.MACHINE, pin_cpus=spec["pin_cpus"]))
        init = Init(channel, spec, upper)
    except (OSError, KeyError) as error:
        frames.send(channel, {"failed": said(error)})
        return
    with contextlib.suppress(frames.Closed):
        frames.send(channel, {"ready": True})
        init.serve()


def _opened(path: str) -> int:
    return os.open(path, os.O_PATH | os.O_CLOEXEC)


def said(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)
