"""What somebody who writes commands may try in order to get out of a sandbox, or to exhaust the machine: each contained, and each named.

`said` is what the attempt prints where it is held back. After each one the sandbox goes on, or is gone and has taken nothing along.
"""

from __future__ import annotations

import asyncio
import io
import os
import re
import socket
import sys
import tarfile
from typing import Any

import pytest

from trainer.environments.sandboxes.namespaces import NamespaceMachine, Namespaces
from trainer.environments.sandboxes.spec import Spec

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")

SPEC = Spec(memory_mb=96, disk_mb=32, processes=48, files=128, output=20_000, timeout=20)
DENIED = r"Operation not permitted|Permission denied|Read-only file system"
NUMBERS = {
    "keyctl": 250,
    "bpf": 321,
    "perf_event_open": 298,
    "io_uring_setup": 425,
    "userfaultfd": 323,
    "kexec_load": 246,
    "init_module": 175,
}
NUMBERS |= {"open_by_handle_at": 304, "setns": 308, "fsopen": 430, "move_mount": 429, "syslog": 103}


def python(code: str) -> str:
    return f"python3 - <<'END'\nimport ctypes, os, socket, sys\nlibc = ctypes.CDLL(None, use_errno=True)\n{code}\nEND"


def call(number: int, *arguments: str) -> str:
    given = ", ".join(f"ctypes.c_long({argument})" for argument in arguments)
    return python(f"result = libc.syscall({number}, {given})\nprint(result, os.strerror(ctypes.get_errno()))")


ATTEMPTS = {
    # exhausting the machine
    "fork bomb": ("f() { f | f & }; f; sleep 0.5; true", "Resource temporarily unavailable"),
    "fork bomb in sessions of their own": (
        python("import time\nfor _ in range(100):\n  if os.fork() == 0: os.setsid(); time.sleep(99)"),
        "Resource temporarily unavailable",
    ),
    "threads": (
        python("import threading\nwait = threading.Event().wait\nfor _ in range(99): threading.Thread(target=wait, args=(9,)).start()"),
        "can't start new thread",
    ),
    "memory": (python("x = bytearray(1 << 30)\nprint('had it')"), r"Killed|MemoryError"),
    "memory of many processes": (
        f"for i in $(seq 12); do {python('x = bytearray(40 << 20); import time; time.sleep(2); print(1)')} & done; wait; true",
        r"Killed|MemoryError|^(?!(1\n){12})",
    ),
    "memory of a file without a name": (
        python("fd = os.memfd_create('x')\nfor _ in range(600): os.write(fd, b'x' * (1 << 20))\nprint('had it')"),
        r"Killed|^(?!had it)",
    ),
    "shared memory": ("head -c 200000000 /dev/zero > /dev/shm/x; rm -f /dev/shm/x", "No space left on device"),
    "disk": ("head -c 200000000 /dev/zero > x; rm -f x", "No space left on device"),
    "a file that is allocated at once": ("fallocate -l 1G x", "No space left on device|fallocate failed"),
    "files without contents": (python("for i in range(10 ** 6): open(f'/tmp/{i}', 'w').close()"), "No space left on device"),
    "open files": (python("kept = [open('/dev/null') for _ in range(1000)]"), "Too many open files"),
    "raising a limit": ("ulimit -n 100000", "cannot modify limit|not permitted"),
    "a gigabyte of output": ("yes | head -c 1000000000", r"more bytes of output left out"),
    "zombies": (
        python("for _ in range(300):\n  if os.fork() == 0:\n    if os.fork() == 0: os._exit(0)\n    os._exit(0)\n  os.wait()")
        + "\nsleep 0.2; grep -l 'State:.Z' /proc/[0-9]*/status 2>/dev/null | wc -l",
        "^0$",
    ),
    # other processes, and those that hold the sandbox
    "ending the first process": ("for each in KILL TERM STOP HUP INT SEGV; do kill -$each 1; done; echo went on", "^went on$"),
    "tracing the first process": (python("print(libc.ptrace(16, 1, 0, 0), os.strerror(ctypes.get_errno()))"), f"^-1 ({DENIED})"),
    "memory of the first process": ("head -c 1 /proc/1/mem", DENIED),
    "variables of the first process": ("cat /proc/1/environ", DENIED),
    "root of the first process": ("ls /proc/1/root/", DENIED),
    "descriptors of the first process": ("ls /proc/1/fd/", DENIED),
    "seeing other processes": ("ls /proc | grep -c '^[0-9]*$'", "^[2-5]$"),
    "own descriptors": ("exec ls /proc/self/fd", "^0\n1\n2\n3\n8$"),
    # the kernel and its settings
    "settings of the kernel": ("echo 1 > /proc/sys/kernel/panic", DENIED),
    "the program that gets core dumps": ("echo '|/x' > /proc/sys/kernel/core_pattern", DENIED),
    "memory of the kernel": ("stat -c %t:%T /proc/kcore", "^1:3$|No such file"),
    "the key for emergencies": ("stat -c %t:%T /proc/sysrq-trigger", "^1:3$|No such file"),
    "the clock": ("date -s '2001-01-01'", "cannot set date"),
    "the name of the machine": (python("socket.sethostname('x')"), DENIED),
    **{f"the call {name}": (call(number, "0", "0", "0", "0"), f"^-1 ({DENIED})") for name, number in NUMBERS.items()},
    "the call clone3": (call(435, "0", "0"), "^-1 Function not implemented"),
    "a user namespace": ("unshare -Ur true", DENIED),
    "a user namespace by clone": (call(56, "0x10000011", "0"), f"^-1 ({DENIED})"),
    "capabilities": ("grep -E '^Cap(Prm|Eff|Bnd|Amb)' /proc/self/status | cut -f 2 | sort -u", "^0000000000000000$"),
    "programs that become root": ("grep -E '^NoNewPrivs' /proc/self/status", "1$"),
    # files
    "a mount": ("mount -t tmpfs none /tmp", "permission denied|must be superuser"),
    "programs of the machine, writable": ("mount -o remount,rw /usr; echo x > /usr/bin/x", DENIED),
    "what hides parts of /proc": ("umount /proc/sys /proc/kcore", "must be superuser|not permitted|denied"),
    "another root": (python("os.chroot('/tmp')"), DENIED),
    "a device node": ("mknod disk b 8 0", DENIED),
    "disks in /dev": ("ls /dev | tr '\\n' ' '", "^fd full null ptmx pts random shm stderr stdin stdout tty urandom zero$"),
    "shadow passwords": ("cat /etc/shadow", "No such file"),
    "somebody else's file in a sticky folder": ("chown 12345 /tmp", "Invalid argument|not permitted"),
    # network
    "the internet": (python("socket.create_connection(('1.1.1.1', 53), 3)"), "Network is unreachable"),
    "the internet over IPv6": (python("socket.create_connection(('2606:4700:4700::1111', 53), 3)"), "unreachable|Cannot assign"),
    "a link of its own": ("ip link add d0 type dummy", DENIED),
    "raw packets": (python("socket.socket(17, socket.SOCK_RAW)"), DENIED),
    "the hypervisor": (python("socket.socket(40, socket.SOCK_STREAM)"), DENIED),
    "typing into a terminal": (python("import fcntl, pty\na, b = pty.openpty()\nfcntl.ioctl(b, 0x5412, b'x')"), DENIED),
}  # fmt: skip

FILLED = ("files without contents", "fork bomb in sessions of their own")  # what they took stays taken


def attempt(body: Any, spec: Spec = SPEC) -> None:
    async def run() -> None:
        provider = Namespaces()
        try:
            async with asyncio.timeout(90):
                machine = await provider.create(spec)
                await body(machine)
        finally:
            provider.close()

    asyncio.run(run())


@pytest.mark.parametrize("name", ATTEMPTS)
def test_it_is_contained(name):
    command, said = ATTEMPTS[name]

    async def body(machine: NamespaceMachine) -> None:
        result = await machine.exec(command)
        assert re.search(said, result.output.strip()), result.output[-500:]
        assert (await machine.exec("echo alive")).stdout == "alive\n"
        assert (await machine.exec("touch /tmp/again; ls /tmp/again")).stdout == "/tmp/again\n" or name in FILLED

    attempt(body)


def test_a_server_of_the_machine_is_out_of_reach_by_port_and_by_name():
    """As Ray's, the endpoint of another episode, or a daemon's."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as named:
        named.bind(name := f"\0flotilla-test-{os.getpid()}")
        named.listen()
        port = server.getsockname()[1]

        async def body(machine: NamespaceMachine) -> None:
            result = await machine.exec(python(f"socket.create_connection(('127.0.0.1', {port}), 3)"))
            assert "Connection refused" in result.stderr
            result = await machine.exec(python(f"socket.socket(socket.AF_UNIX).connect({name!r})"))
            assert "Connection refused" in result.stderr

        attempt(body)


def test_files_and_sockets_of_the_machine_and_variables_of_the_run_are_not_there(tmp_path, monkeypatch):
    token = tmp_path / "ray.token"
    token.write_text("secret")
    monkeypatch.setenv("WANDB_API_KEY", "sesame")
    with socket.socket(socket.AF_UNIX) as server:
        os.chdir(tmp_path)
        server.bind("raylet.sock")
        server.listen()

        async def body(machine: NamespaceMachine) -> None:
            result = await machine.exec(
                f"cat {token}; ls {tmp_path} /work /home /mnt /var /tmp/ray; find / -name '*.token' -o -name '*.sock' 2>/dev/null"
            )
            assert not result.stdout and str(token) in result.stderr
            result = await machine.exec("env; cat /proc/*/environ | tr '\\0' '\\n'")
            assert "HOME=/root" in result.stdout and "sesame" not in result.output and "WANDB" not in result.output

        attempt(body)


def test_links_lead_nowhere_but_into_the_sandbox(tmp_path):
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "given").mkdir()
    (tmp_path / "given/out").symlink_to(tmp_path / "secret")
    (tmp_path / "given/up").symlink_to("../../../../../../etc/passwd")

    async def body(machine: NamespaceMachine) -> None:
        await machine.upload(tmp_path / "given", "/workspace/given")
        with pytest.raises(OSError, match="No such file"):
            await machine.read("given/out")
        assert (await machine.text("given/up")).startswith("root:x:0:0:root:/root:/bin/sh\nnobody")
        await machine.exec("ln -s /proc/1/root/etc/shadow shadow; mkfifo pipe")
        for path, said in (("shadow", "Permission denied"), ("pipe", "is no regular file")):
            with pytest.raises(OSError, match=said):
                await machine.read(path)
        with pytest.raises(OSError, match="No such device"):
            await machine.write("pipe", "x")

    attempt(body)


def archive(*members: tuple[str, bytes, str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as made:
        for name, kind, link in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, link
            made.addfile(member)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ([("../out", tarfile.REGTYPE, "")], "../out: leads out of"),
        ([("a/../../out", tarfile.REGTYPE, "")], "leads out of"),
        ([("/tmp/out", tarfile.REGTYPE, "")], "/tmp/out: leads out of"),
        ([("a", tarfile.SYMTYPE, "/tmp"), ("a/out", tarfile.REGTYPE, "")], "a/out: leads out of"),
        ([("a", tarfile.LNKTYPE, "../../etc/passwd")], "links to ../../etc/passwd"),
        ([("disk", tarfile.BLKTYPE, "")], "disk: is a device"),
    ],
)
def test_an_archive_that_leads_out_of_its_folder_is_refused(members, said):
    async def body(machine: NamespaceMachine) -> None:
        with pytest.raises(OSError, match=re.escape(said)):
            await machine.unpack(archive(*members), "/workspace/given")
        assert (await machine.exec("ls /tmp /workspace | grep -c out")).stdout == "0\n"

    attempt(body)


def test_a_snapshot_of_a_disk_that_was_bent_leads_nowhere(tmp_path):
    """Folders of the system are replaced by links before it is taken; who unpacks it would follow them with rights."""

    async def body(machine: NamespaceMachine) -> None:
        await machine.exec(f"mv /etc /etc2; ln -s {tmp_path} /etc; rm -rf /root /run; ln -s {tmp_path} /root; ln -s {tmp_path} /run")
        try:
            other = await machine.fork()
            await other.exec("true")
        except RuntimeError as error:
            assert "is a link; give a path without links" in str(error)
        assert not list(tmp_path.iterdir())

    tmp_path.chmod(0o777)
    attempt(body)
