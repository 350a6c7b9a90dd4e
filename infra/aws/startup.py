"""What a node boots: its image, and ready.sh with what is particular to the stack in front."""

from __future__ import annotations

import base64
import shlex
from collections.abc import Sequence
from pathlib import Path

from stacks.machines import Machine

# AWS's name for its newest image with NVIDIA's driver, Docker, the container toolkit and EFA:
# https://docs.aws.amazon.com/dlami/latest/devguide/aws-deep-learning-base-gpu-ami-ubuntu-22-04.html
GPU_IMAGE = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id"
CPU_IMAGE = "/aws/service/canonical/ubuntu/server/22.04/stable/current/amd64/hvm/ebs-gp3/ami-id"
READY = Path(__file__).with_name("ready.sh")


def image_parameter(machine: Machine) -> str:
    """The parameter of SSM that holds the id of the newest image for a machine."""
    return GPU_IMAGE if machine.gpu else CPU_IMAGE


def script(user: str, mount: Sequence[str], folder: str) -> str:
    """User data: what an instance runs once, in base64; `mount` are shell lines that mount `folder`, if any."""
    lines = ["#!/bin/bash", f"user={user}", f"checkpoints={shlex.quote(folder) if mount else ''}"]
    lines += ["mount_checkpoints() {", *(f"  {line}" for line in mount or [":"]), "}"]
    return base64.b64encode(("\n".join(lines) + "\n" + READY.read_text()).encode()).decode()
