"""Limits by control groups: of version 2 where they are delegated to this user, of version 1 where this is root."""

from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

PREFIX = "flotilla-sandbox-"
KINDS = ("memory", "pids", "cpu")
NAME = re.compile(rf"{PREFIX}n(\d+)-(\d+)-(\d+)-")  # the warden's namespace of processes, its number there, and when it began
PERIOD = 100_000  # microseconds, of which a sandbox may compute its share


@dataclass
class Groups:
    """Where groups of sandboxes are made, by what they limit; nothing for what this user may not limit."""

    v1: dict[str, Path] = field(default_factory=dict)
    v2: Path | None = None
    v2_kinds: tuple[str, ...] = ()

    @property
    def kinds(self) -> set[str]:
        return {*self.v1, *self.v2_kinds}

    @property
    def folders(self) -> list[Path]:
        return [*{*self.v1.values(), *([self.v2] if self.v2 else [])}]


def began(pid: int) -> str:
    """In ticks since the machine's start: with the number, the name of a process that no other one has. Raises OSError where it is gone."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def own_name() -> str:
    """How the groups of this process begin. Containers may share a tree of groups, and know nothing of one another's processes."""
    return f"{PREFIX}n{_numbers()}-{os.getpid()}-{began(os.getpid())}-"


def _numbers() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def found() -> Groups:
    """Tried by making and removing one."""
    groups, own = Groups(), _own()
    mounted = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    probe = f"{own_name()}probe"
    for _, point, kind, options, *_ in mounted:
        if kind == "cgroup":
            for name in KINDS:
                if name in options.split(",") and name in own:
                    folder = Path(point) / own[name].lstrip("/")
                    if name not in groups.v1 and _may(folder / probe):
                        groups.v1[name] = folder
        elif kind == "cgroup2" and "" in own and groups.v2 is None:
            _find_v2(groups, Path(point) / own[""].lstrip("/"), probe)
    return groups


def _find_v2(groups: Groups, here: Path, probe: str) -> None:
    """The group that this process is in cannot have groups below it that limit, so theirs are beside it, where that is delegated too."""
    for folder in (here, here.parent):
        with contextlib.suppress(OSError):
            there = (folder / "cgroup.controllers").read_text().split()
            wanted = [name for name in KINDS if name in there and name not in groups.v1]
            on = (folder / "cgroup.subtree_control").read_text().split()
            if missing := [name for name in wanted if name not in on]:
                (folder / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in missing))
            if wanted and _may(folder / probe):
                groups.v2, groups.v2_kinds = folder, tuple(wanted)
                return


def _own() -> dict[str, str]:
    found = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        found |= dict.fromkeys(names.split(","), path)
    return found


def _may(folder: Path) -> bool:
    try:
        folder.mkdir()
        folder.rmdir()
    except OSError:
        return False
    return True


class Group:
    """Of one sandbox."""

    def __init__(self, groups: Groups, name: str):
        self.groups = groups
        self.folder = f"{own_name()}{name}"

    def make(self, memory: int, processes: int, cpu: float) -> None:
        """Bytes, processes and CPUs. Raises OSError."""
        for folder in self.groups.folders:
            (folder / self.folder).mkdir()
        quota = max(1000, int(cpu * PERIOD))
        for kind in self.groups.kinds:
            of_v2 = kind not in self.groups.v1
            at = (self.groups.v2 or Path()) / self.folder if of_v2 else self.groups.v1[kind] / self.folder
            if kind == "memory":
                (at / ("memory.max" if of_v2 else "memory.limit_in_bytes")).write_text(str(memory))
                with contextlib.suppress(OSError):  # a machine without swap has no such file
                    (at / ("memory.swap.max" if of_v2 else "memory.memsw.limit_in_bytes")).write_text("0" if of_v2 else str(memory))
            elif kind == "pids":
                (at / "pids.max").write_text(str(processes))
            elif of_v2:
                (at / "cpu.max").write_text(f"{quota} {PERIOD}")
            else:
                (at / "cpu.cfs_period_us").write_text(str(PERIOD))
                (at / "cpu.cfs_quota_us").write_text(str(quota))

    def add(self, pid: int) -> None:
        for folder in self.groups.folders:
            (folder / self.folder / "cgroup.procs").write_text(str(pid))

    def killed(self) -> int:
        """Processes that the memory limit ended so far."""
        with contextlib.suppress(OSError, KeyError, ValueError):
            if "memory" in self.groups.v1:
                text = (self.groups.v1["memory"] / self.folder / "memory.oom_control").read_text()
            else:
                text = ((self.groups.v2 or Path()) / self.folder / "memory.events").read_text()
            return int(dict(line.split() for line in text.splitlines())["oom_kill"])
        return 0

    def refused(self) -> int:
        """Processes that there was no room for so far."""
        with contextlib.suppress(OSError, KeyError, ValueError):
            folder = self.groups.v1.get("pids") or self.groups.v2 or Path()
            return int(dict(line.split() for line in (folder / self.folder / "pids.events").read_text().splitlines())["max"])
        return 0

    def remove(self) -> bool:
        """False where something is still in it."""
        return _removed([folder / self.folder for folder in self.groups.folders])


def reap(groups: Groups, seconds: float = 5.0) -> int:
    """Remove groups of wardens that are gone, and end what is in them. Returns how many there were."""
    left = [
        each
        for folder in groups.folders
        for each in folder.glob(f"{PREFIX}*")
        if (match := NAME.match(each.name)) and int(match[1]) == _numbers() and not _lives(int(match[2]), match[3])
    ]
    for each in left:
        with contextlib.suppress(OSError):
            for pid in map(int, (each / "cgroup.procs").read_text().split()):
                if pid > 0:  # 0 is one of another namespace, and to kill() all of our own group
                    os.kill(pid, 9)
    _removed(left, seconds if left else 0.0)
    return len(left)


def _lives(pid: int, since: str) -> bool:
    try:
        return began(pid) == since
    except OSError:
        return False


def _removed(folders: list[Path], seconds: float = 0.0) -> bool:
    until = time.monotonic() + seconds
    while True:
        for folder in folders:
            with contextlib.suppress(OSError):
                folder.rmdir()
        if not any(folder.exists() for folder in folders):
            return True
        if time.monotonic() >= until:
            return False
        time.sleep(0.02)  # until the kernel has taken what was killed out of it
