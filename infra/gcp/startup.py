"""What a node runs when it boots: ready.sh, with what is particular to the stack in front."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from stacks.cloud_settings import Access
from stacks.dstack_api import get_backend_specific_commands_tcpxo
from stacks.machines import Fabric

READY = Path(__file__).with_name("ready.sh")
DATAPATH = "receive-datapath-manager"  # the container of GPUDirect-TCPXO that must run beside every job


def script(access: Access, mount: Sequence[str], fabric: Sequence[str]) -> str:
    """A bash script; `mount` and `fabric` are shell lines."""
    lines = ["#!/bin/bash", f"user={access.user}", f"public_key={shlex.quote(access.public_key.strip())}"]
    lines += _function("mount_checkpoints", mount) + _function("start_fabric", fabric)
    return "\n".join(lines) + "\n" + READY.read_text()


def fabric_lines(fabric: Fabric, own_image: bool) -> list[str]:
    """What starts the fabric on dstack's image for A3 Mega, in dstack's own words; an image of yours does it itself."""
    if fabric != "tcpxo" or own_image:
        return []
    return [f"docker rm --force {DATAPATH} 2>/dev/null || true", *get_backend_specific_commands_tcpxo()]


def _function(name: str, lines: Sequence[str]) -> list[str]:
    return [f"{name}() {{", *(f"  {line}" for line in lines or [":"]), "}"]
