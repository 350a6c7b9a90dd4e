"""What nodes run in: the image of the task, and how Ray and the trainer's requirements get into it.

dstack's own image gets the locked requirements when a node starts, and so does an image that is said not to contain Ray
(flotilla:task.image_has_ray). `node/software.sh` installs them, or says what an image lacks.
"""

from __future__ import annotations

import shlex
from typing import Any

from cluster_tasks import fabric
from stacks import dstack_api
from stacks.places import place_of
from stacks.schema import Fleet, Stack

PYTHON = "3.11"  # of dstack's own image
SCRIPT = "software.sh"  # in the node agent's folder


def software(stack: Stack, fleets: list[Fleet], agent: str) -> dict[str, Any]:
    """The task's `image` or `python`, and its `files`; `agent` is the node agent's folder.

    Raises ValueError where no image can run on these GPUs.
    """
    image, lock = image_of(stack, fleets), f"../../requirements/{_lock(stack, fleets)}.txt:requirements.txt"
    runs = {"python": PYTHON} if image is None else {"image": image}
    return runs | {"files": [agent] if _contains_ray(stack) else [agent, lock]}


def commands(stack: Stack, fleets: list[Fleet], agent: str) -> list[str]:
    """Shell lines after which `python3` and `ray` are on PATH."""
    image = image_of(stack, fleets)
    if image is None:
        return ["command -v ray >/dev/null || uv pip install --quiet --requirement requirements.txt"]
    return [shlex.join([".", f"{agent}/{SCRIPT}", image, *(["ray"] if _contains_ray(stack) else [])])]


def image_of(stack: Stack, fleets: list[Fleet]) -> str | None:
    """The image that the task names; None where dstack is left to choose its own.

    On machines that dstack launches it takes the one with EFA by itself. Of others it knows no machine type, and would take the plain
    one, in which NCCL finds no EFA and falls back to TCP.
    """
    cloud = place_of(stack).cloud
    unknown = [fleet for fleet in fleets if not (cloud and fleet.provision == "dstack")]
    if stack.task.image is None and any(fabric.kind(stack, fleet) == "efa" for fleet in unknown):
        return efa_image()
    return stack.task.image


def efa_image() -> str:
    """dstack's own image with libfabric and the plugin of NCCL, of the release that is installed here."""
    release, ubuntu = dstack_api.DSTACK_DOCKER_BASE_IMAGE_VERSION, dstack_api.DSTACK_DOCKER_BASE_IMAGE_UBUNTU_VERSION
    return f"{dstack_api.DSTACK_DOCKER_BASE_IMAGE}:{release}-devel-efa-ubuntu{ubuntu}"


def _contains_ray(stack: Stack) -> bool:
    return stack.task.image is not None and stack.task.image_has_ray


def _lock(stack: Stack, fleets: list[Fleet]) -> str:
    vendors = {fleet.gpu.vendor for fleet in fleets if fleet.gpu is not None and fleet.gpu.count}
    if "amd" in vendors and not _contains_ray(stack):
        named = "image is missing" if stack.task.image is None else "image_has_ray is false"
        why = "neither dstack's own image nor the locked requirements have ROCm, so AMD GPUs need an image with Ray and ROCm"
        raise ValueError(f"flotilla:task.{named}; {why}")
    return "gpu" if vendors else "cpu"
