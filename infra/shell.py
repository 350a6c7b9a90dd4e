"""Parts of the shell lines that nodes run, alike on every cloud."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stacks.places.machine_types import Machine

# A checkpoint is complete once its folder is renamed, and Mountpoint for S3 renames no folder
# (https://github.com/awslabs/mountpoint-s3/blob/main/doc/SEMANTICS.md); s3fs does, and writes through on fsync.
S3FS = "command -v s3fs >/dev/null || { apt-get update -qq && apt-get install -qq -y s3fs; }"
LOCAL_DISKS = Path(__file__).with_name("local_disks.sh")


def function(name: str, lines: Sequence[str]) -> list[str]:
    """A shell function of these lines; without any it does nothing."""
    return [f"{name}() {{", *(f"  {line}" for line in lines or [":"]), "}"]


def local_disks(machine: Machine) -> str:
    """`use_local_disks` for a machine that has some."""
    return LOCAL_DISKS.read_text() if machine.nvme else "use_local_disks() { :; }\n"
