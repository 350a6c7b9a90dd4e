"""What Slurm asks of a stack's settings, checked before anything is submitted."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic_core import PydanticCustomError

from stacks.places.place import Place
from stacks.schema import Stack
from stacks.settings import sbatch
from stacks.settings.fields import known, setting_error
from stacks.settings.slurm import ANY, CONTAINERS, seconds

# Settings that only dstack reads, with what to say in their place.
TASK_OF_DSTACK = {
    "user": "jobs run as whoever submits them",
    "retry": "slurm.requeue says how often a job resumes",
    "priority": "slurm.qos, slurm.account and slurm.partition decide",
    "max_duration": "slurm.time is the limit",
    "stop_duration": "slurm.time is the limit",
    "utilization": "the cluster's own tools watch GPUs",
}
SHARED_NODES = "nodes are shared with other jobs (slurm.exclusive: false), so say how much of one you want"


def _refused(stack: Stack) -> Iterator[PydanticCustomError]:
    """The most basic first."""
    for rule in (_fleets, _checkpoints, _container, _image, _allocation, _options, _dstack):
        yield from known(rule(stack))


def _fleets(stack: Stack) -> Iterator[PydanticCustomError]:
    """Of a heterogeneous job: a component for each fleet of the cluster."""
    if len(stack.task.fleets) < 2 or not set(stack.task.fleets) <= {fleet.name for fleet in stack.fleets}:
        return
    fleets = stack.cluster_fleets()
    if not stack.slurm.exclusive:
        text = f"False, but a cluster of {len(fleets)} fleets (task.fleets) takes whole nodes: Slurm may give one node to two of them"
        yield setting_error(text, "slurm", "exclusive")
    same = [fleet.gpu for fleet in fleets if not (fleet.slurm and fleet.slurm.gpu_type)]
    names = sorted({gpu.name for gpu in same if gpu and gpu.count and gpu.name})
    if stack.slurm.gpu_type not in (None, ANY) and len(names) > 1:
        text = f"{stack.slurm.gpu_type!r} would be asked of {' and '.join(names)} alike; say it in fleets[].slurm.gpu_type"
        yield setting_error(text, "slurm", "gpu_type")


def _checkpoints(stack: Stack) -> Iterator[PydanticCustomError]:
    if stack.checkpoints.kind == "shared" and not stack.checkpoints.says("path"):
        yield setting_error("is missing; it is a folder on the file system that all nodes share, such as /shared/me", "checkpoints", "path")


def _dstack(stack: Stack) -> Iterator[PydanticCustomError]:
    """Its settings without it, and what it needs beyond the scripts' own."""
    slurm, gpu = stack.slurm.of(stack.fleets[0].slurm), stack.fleets[0].gpu
    if stack.dstack is None:
        for key, instead in TASK_OF_DSTACK.items():
            if stack.task.says(key):
                yield setting_error(f"belongs to flotilla:dstack, which is not set; for sbatch {instead}", "task", key)
        if slurm.identity_file:
            yield setting_error("belongs to flotilla:dstack, which is not set", "slurm", "identity_file")
        return
    if len(stack.fleets) > 1:
        yield setting_error(f"{len(stack.fleets)} fleets, but dstack places a run on Slurm in one; leave one", "fleets")
    if "@" not in (slurm.login or ""):
        yield setting_error("is missing or without its user; dstack logs in there: me@login.example.com", "slurm", "login")
    for key, why in (("identity_file", "dstack logs in with it"), ("partition", "dstack places runs by it")):
        if getattr(slurm, key) is None:
            yield setting_error(f"is missing; {why}", "slurm", key)
    if gpu and gpu.count and not gpu.name:
        yield setting_error("is missing; dstack finds partitions by the GPU's name", "fleets", 0, "gpu", "name")


def _container(stack: Stack) -> Iterator[PydanticCustomError]:
    container = stack.slurm.container
    for index, mount in enumerate(stack.task.volumes):
        if not mount.startswith("/"):
            yield setting_error(f"{mount!r} is a volume of dstack; on Slurm mount a folder, such as /data:/data", "task", "volumes", index)
        elif container == "none":
            yield setting_error(f"{mount!r}, but without a container nodes see folders as they are; leave it out", "task", "volumes", index)
    if stack.task.shm_size and container not in ("docker", "podman"):
        yield setting_error(f"belongs to slurm.container docker or podman, but that is {container}", "task", "shm_size")


def _image(stack: Stack) -> Iterator[PydanticCustomError]:
    container, image = stack.slurm.container, stack.task.image
    if container != "none" and image is None:
        yield setting_error(f"is missing; slurm.container {container} runs an image", "task", "image")
    if image is not None and not stack.task.image_has_ray:
        text = f"false, but with slurm.container {container} nodes install nothing as they start; build Ray into the image"
        yield setting_error(text, "task", "image_has_ray")
    if container == "none" and image is not None:
        yield setting_error(f"none, but task.image names {image!r}; take one of {', '.join(CONTAINERS[1:])}", "slurm", "container")
    if image is not None and image.startswith("/"):
        ending = {"pyxis": ".sqsh", "apptainer": ".sif"}.get(container)
        if ending is None:
            yield setting_error(f"{image!r} is a file, but {container} takes an image by its name and tag", "task", "image")
        elif not image.endswith(ending):
            yield setting_error(f"{image!r} is not a file that {container} runs; those end in {ending}", "task", "image")


def _allocation(stack: Stack) -> Iterator[PydanticCustomError]:
    slurm = stack.slurm
    with_gpus = [fleet for fleet in stack.fleets if fleet.gpu and fleet.gpu.count]
    if slurm.gpu_type and not with_gpus:
        yield setting_error(f"{slurm.gpu_type!r}, but fleets[0].gpu.count asks for no GPU", "slurm", "gpu_type")
    for index, fleet in enumerate(stack.fleets):
        if fleet.slurm and fleet.slurm.gpu_type and fleet not in with_gpus:
            text = f"{fleet.slurm.gpu_type!r}, but fleets[{index}].gpu.count asks for no GPU"
            yield setting_error(text, "fleets", index, "slurm", "gpu_type")
    if slurm.time and (limit := seconds(slurm.time)) is not None and limit < 2 * slurm.notice:
        text = f"{slurm.time!r} is short: jobs are asked to save {slurm.notice} s before its end (slurm.notice), so take twice that or more"
        yield setting_error(text, "slurm", "time")
    if not slurm.exclusive and slurm.container in ("docker", "podman"):
        text = f"False, but {slurm.container} does not know which GPUs Slurm gave the job; take whole nodes, or pyxis or apptainer"
        yield setting_error(text, "slurm", "exclusive")
    if not slurm.exclusive:
        for index, fleet in enumerate(stack.fleets):
            for key in ("cpus", "memory"):
                if getattr(fleet, key) is None:
                    yield setting_error(f"is missing; {SHARED_NODES}", "fleets", index, key)


def _options(stack: Stack) -> Iterator[PydanticCustomError]:
    of_fleets = [(("fleets", index), fleet.slurm) for index, fleet in enumerate(stack.fleets) if fleet.slurm]
    for at, nodes in ((), stack.slurm), *of_fleets:
        for index, option in enumerate(nodes.sbatch):
            if instead := sbatch.instead(option):
                yield setting_error(f"{option} is set for you: {instead}", *at, "slurm", "sbatch", index)


PLACE = Place(
    name="slurm",
    program="infra.slurm",
    refused=_refused,
    checkpoints=("shared",),
    settings=("slurm", "fleets.slurm"),
    batch=True,
    start="sbatch build/slurm/ray-ppo.sbatch",
)
