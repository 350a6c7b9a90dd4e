"""Full disks and short memory on this node."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from .settings import Settings

FULL = 0.01  # of a disk is left

log = logging.getLogger(__name__)


@dataclass
class Health:
    """What ends training without a word of its own: full disks, and the kernel's killing where memory is short."""

    folders: list[str]
    killed: int  # processes, so far
    full: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, settings: Settings) -> Health:
        folders = (settings.temp_dir or tempfile.gettempdir(), os.environ.get("FLOTILLA_RUNS"))
        return cls([folder for folder in folders if folder and Path(folder).is_dir()], oom_kills())

    def report(self) -> None:
        """Logs what is new."""
        for folder in self.folders:
            disk = shutil.disk_usage(folder)
            if disk.free >= disk.total * FULL:
                self.full.discard(folder)
            elif folder not in self.full:
                self.full.add(folder)
                log.error("disk full: %s has %d of %d MB left", folder, disk.free >> 20, disk.total >> 20)
        if (killed := oom_kills()) > self.killed:
            log.error("out of memory: the kernel killed %d processes on this node; see flotilla:fleets[].memory", killed - self.killed)
            self.killed = killed


def oom_kills() -> int:
    """Processes of this container that the kernel has killed for want of memory, by cgroup v2 or v1; 0 where neither says."""
    for file in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        with contextlib.suppress(OSError):
            counts = dict(line.split() for line in Path(file).read_text().splitlines())
            return int(counts.get("oom_kill", 0))
    return 0
