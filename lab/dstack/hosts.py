"""Machines on this machine: each is a process with namespaces of its own (network, mounts, processes, hostname), and ends with it.

`Host` has a throw-away root in memory, an SSH server and a Docker daemon. `Laptop` is the person's machine, with this one's files: the
dstack server, its CLI and `ray job submit` run there. They share a network that nothing else reaches, and that reaches nothing else.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from lab.waiting import wait_for

HERE = Path(__file__).parent
NETWORK = "198.18.77"  # of RFC 2544, for tests of network devices
CLONE_NEWNET = 0x40000000  # setns(2)
LIBC = ctypes.CDLL(None, use_errno=True)
UNSHARE = ["setpriv", "--pdeathsig", "KILL", "unshare", "--kill-child", "--fork", "--net", "--mount", "--pid", "--uts", "--ipc"]
PATH = f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SOFTWARE = [str(path) for path in dict.fromkeys((Path(sys.prefix), Path(sys.base_prefix))) if not path.is_relative_to("/usr")]


def sh(command: str | Sequence[str], timeout: float = 120) -> str:
    """Output of a command that must succeed."""
    shell = isinstance(command, str)
    done = subprocess.run(
        command, shell=shell, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout, check=False, env={"PATH": PATH}
    )
    assert done.returncode == 0, f"{command}: exit code {done.returncode}\n{done.stdout[-3000:]}"
    return done.stdout


class Machine:
    """Namespaces, and the process that is their pid 1."""

    def __init__(self, name: str, number: int, folder: Path, *command: str, options: Sequence[str] = (), environment: dict[str, str]):
        self.name, self.address, self.folder = name, f"{NETWORK}.{number}", folder / name
        self.folder.mkdir(exist_ok=True)
        self.process = subprocess.Popen(
            # It starts when its network is there.
            [*UNSHARE, *options, "bash", "-c", 'read -r _ && exec "$@"', "-", *command],
            stdin=subprocess.PIPE,
            stdout=(self.folder / "init.log").open("w"),
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        self.pid = int(wait_for(f"{name} to start", lambda: children.read_text().split(), 180)[0])  # its pid 1, seen from here
        self.end = os.pidfd_open(self.pid)  # can be read once it and all of its processes have ended
        own = Path("/proc/thread-self/ns/net").readlink()
        wait_for(f"{name} to start", lambda: Path(f"/proc/{self.pid}/ns/net").readlink() != own, 180)
        self.enter = ["nsenter", "-t", str(self.pid), "-m", "-p", "-u", "-i", "-n", "--"]

    def boot(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.close()

    def sh(self, command: str, timeout: float = 120) -> str:
        """Output of a command on this machine, which must succeed."""
        return sh([*self.enter, "sh", "-c", command], timeout)

    def power_off(self) -> None:
        """The power cord: everything on it ends at once."""
        self.process.kill()
        self.process.wait(120)
        assert select.select([self.end], [], [], 60)[0], f"{self.name} did not end"

    def start(self, *command: str, cwd: Path, environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
        """A process on this machine, in a group of its own. `interrupt` ends it."""
        with log.open("w") as output:
            return subprocess.Popen(
                # A shell has its background jobs ignore Ctrl-C, and these tests may be one.
                [*self.enter, "env", "--default-signal=INT", f"--chdir={cwd}", *command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @contextlib.contextmanager
    def network(self) -> Iterator[None]:
        """Sockets that this thread opens inside are this machine's; also those of the processes and threads that it starts."""
        with Path("/proc/thread-self/ns/net").open("rb") as home, Path(f"/proc/{self.pid}/ns/net").open("rb") as there:
            enter(there.fileno())
            try:
                yield
            finally:
                enter(home.fileno())


def enter(namespace: int) -> None:
    if LIBC.setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


class Laptop(Machine):
    """The person's machine, and the switch that the hosts' cables end in."""

    def __init__(self, folder: Path, name: str = "laptop"):
        super().__init__(name, 1, folder, "sleep", "infinity", options=["--mount-proc"], environment={"PATH": PATH})
        self.boot()
        self.sh(f"ip link set lo up; ip link add br0 type bridge; ip addr add {self.address}/24 dev br0; ip link set br0 up")


def interrupt(process: subprocess.Popen[bytes], number: int = signal.SIGINT) -> int:
    """Signals a process of `Machine.start`, as Ctrl-C does its group; its exit code."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
    return process.wait(180)


class Host(Machine):
    """A machine for a dstack fleet over SSH. Made again with the same number, it is the same machine after a boot."""

    def __init__(self, number: int, folder: Path, laptop: Laptop):
        self.laptop, self.cable = laptop, f"host{number}"
        environment = {"PATH": PATH, "FLOTILLA_SOFTWARE": " ".join(SOFTWARE), "FLOTILLA_LAB": str(os.getpid())}
        init = (str(HERE / "host/init"), f"host{number}", str(folder / f"host{number}"))
        super().__init__(f"host{number}", 10 + number, folder, *init, environment=environment)
        plug = f"ip link add {self.cable} type veth peer name eth0 netns {self.pid}; ip link set {self.cable} master br0 up"
        sh(f"nsenter -t {laptop.pid} -n sh -ec '{plug}'")
        sh(f"nsenter -t {self.pid} -n sh -ec 'ip link set lo up; ip addr add {self.address}/24 dev eth0; ip link set eth0 up'")
        self.boot()

    def power_off(self) -> None:
        super().power_off()
        # The kernel pulls the cable out when it gets round to it, and a boot before that would find it in the switch.
        sh(f"nsenter -t {self.laptop.pid} -n sh -c 'ip link delete {self.cable} 2>/dev/null || true'")

    def ready(self, image: Path, tag: str, path: str) -> None:
        """Docker and SSH answer, and the image is there."""
        wait_for(f"Docker on {self.name}, see {self.folder}/init.log", self.docker_answers, 180)
        self.docker("import", "--change", f"ENV PATH={path}", str(image), tag)
        with self.laptop.network():
            wait_for(f"SSH on {self.name}", lambda: socket.create_connection((self.address, 22), 1), 180).close()

    def docker_answers(self) -> bool:
        return subprocess.run(["docker", "-H", self.docker_socket, "info"], capture_output=True, check=False).returncode == 0

    @property
    def docker_socket(self) -> str:
        return f"unix:///proc/{self.pid}/root/run/docker.sock"

    def docker(self, *arguments: str, timeout: float = 120) -> str:
        return sh(["docker", "-H", self.docker_socket, *arguments], timeout)

    def containers(self) -> list[str]:
        """Of all that there are, running or not."""
        return self.docker("ps", "--all", "--quiet").split()

    def agents(self) -> list[str]:
        """Node agents that run in its containers."""
        return self.sh("pgrep -f 'python3 nod[e]' || true").split()

    def limit_memory(self, spare_mb: int | None) -> None:
        """Its containers together may take this much more than they have now; None: all that there is."""
        group, version_1 = f"flotilla/{self.name}-{os.getpid()}", Path("/sys/fs/cgroup/memory")
        used, limit = ("memory.usage_in_bytes", "memory.limit_in_bytes") if version_1.is_dir() else ("memory.current", "memory.max")
        folder = (version_1 if version_1.is_dir() else Path("/sys/fs/cgroup")) / group
        unlimited = "-1" if version_1.is_dir() else "max"
        bytes_ = unlimited if spare_mb is None else str(int((folder / used).read_text()) + (spare_mb << 20))
        (folder / limit).write_text(bytes_)

    def link(self, up: bool) -> None:
        self.laptop.sh(f"ip link set {self.cable} {'up' if up else 'down'}")
