"""What a sandbox is made of and may take, whoever provides it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

VARIABLES = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "USER": "root",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
}


class SandboxError(RuntimeError):
    """A sandbox that cannot be made, or is gone."""


class Lost(SandboxError):
    """Its end was not its own doing: what held it has ended, or is cut off. The episode may be played again in another one."""


class Unavailable(SandboxError):
    """No sandbox can be made here at all."""


@dataclass(frozen=True)
class Spec:
    image: str = ""  # a folder with a system, or a name that containers know; "": this machine's programs
    folders: Mapping[str, str] = field(default_factory=dict)  # paths of the sandbox: folders of the node, shown there read-only
    workdir: str = "/workspace"
    env: Mapping[str, str] = field(default_factory=dict)
    cpu: float = 1.0
    memory_mb: int = 512
    processes: int = 64
    disk_mb: int = 256
    files: int = 256  # open ones, of a process
    network: tuple[str, ...] = ()  # hosts, or HOST:PORT, that programs reach by a proxy
    timeout: float = 60.0  # seconds of a command
    output: int = 1 << 20  # bytes of a command's output that are kept
    ports: tuple[int, ...] = ()  # on the sandbox's loopback, whose connections its owner takes

    @property
    def variables(self) -> dict[str, str]:
        return {**VARIABLES, **self.env}


@dataclass(frozen=True)
class Result:
    """Of a command. A negative code is the signal that ended it."""

    code: int
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool = False
    left_out: int = 0  # bytes of output beyond the limit
    out_of_memory: bool = False

    @property
    def output(self) -> str:
        """Both streams, and what ended it where that was a limit: what a model is to read."""
        notes = [f"[{self.left_out} more bytes of output left out]"] if self.left_out else []
        notes += [f"[ended after {self.seconds:.0f} s]"] if self.timed_out else []
        notes += ["[ended: out of memory]"] if self.out_of_memory else []
        return "\n".join(part for part in (self.stdout.rstrip("\n"), self.stderr.rstrip("\n"), *notes) if part)


@dataclass(frozen=True)
class Snapshot:
    """What was written to a sandbox's disk, not its processes."""

    provider: str
    image: str
    path: str  # of a file of this node
    size: int
