"""What Slurm asks of a stack's settings, checked before anything is submitted."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic_core import PydanticCustomError

from stacks.field_types import known, setting_error
from stacks.rules.place import Place
from stacks.schema import Stack
from stacks.slurm import CONTAINERS, NOTICE, seconds

# Options of sbatch that the stack's own settings make, and those that would break the scripts, by what to say instead.
OWN = {
    "account": "slurm.account",
    "chdir": "submit in the project's folder",
    "cpus-per-task": "fleets[0].cpus",
    "exclusive": "slurm.exclusive",
    "gpus-per-node": "fleets[0].gpu.count",
    "gres": "fleets[0].gpu.count",
    "job-name": "sbatch --job-name=... on the command line",
    "mail-type": "slurm.mail",
    "mail-user": "slurm.mail",
    "mem": "fleets[0].memory",
    "nodes": "fleets[0].nodes",
    "ntasks": "one task per node, which is the node agent",
    "ntasks-per-node": "one task per node, which is the node agent",
    "partition": "slurm.partition",
    "qos": "slurm.qos",
    "requeue": "slurm.requeue",
    "no-requeue": "slurm.requeue",
    "signal": f"jobs are signalled {NOTICE} s before the time limit",
    "time": "slurm.time",
}
# Settings that only dstack reads, with what to say in their place.
TASK_OF_DSTACK = {
    "user": "jobs run as whoever submits them",
    "retry": "slurm.requeue says how often a job resumes",
    "max_duration": "slurm.time is the limit",
    "stop_duration": "slurm.time is the limit",
    "utilization": "the cluster's own tools watch GPUs",
    "fleets": "an allocation is of homogeneous nodes",
}
SHARED_NODES = "nodes are shared with other jobs (slurm.exclusive: false), so say how much of one you want"


def _errors(stack: Stack) -> Iterator[PydanticCustomError]:
    """The most basic first."""
    for rule in (_fleet, _checkpoints, _container, _image, _allocation, _options, _dstack):
        yield from known(rule(stack))


def _fleet(stack: Stack) -> Iterator[PydanticCustomError]:
    if len(stack.fleets) > 1:
        yield setting_error(f"{len(stack.fleets)} fleets, but a Slurm allocation is of homogeneous nodes; leave one", "fleets")


def _checkpoints(stack: Stack) -> Iterator[PydanticCustomError]:
    if stack.checkpoints.kind == "shared" and not stack.checkpoints.says("path"):
        yield setting_error("is missing; it is a folder on the file system that all nodes share, such as /shared/me", "checkpoints", "path")


def _dstack(stack: Stack) -> Iterator[PydanticCustomError]:
    """Its settings without it, and what it needs beyond the scripts' own."""
    slurm, gpu = stack.slurm, stack.fleets[0].gpu
    if stack.dstack is None:
        for key, instead in TASK_OF_DSTACK.items():
            if stack.task.says(key):
                yield setting_error(f"belongs to flotilla:dstack, which is not set; for sbatch {instead}", "task", key)
        if slurm.identity_file:
            yield setting_error("belongs to flotilla:dstack, which is not set", "slurm", "identity_file")
        return
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
    if container == "none" and image is not None:
        yield setting_error(f"none, but task.image names {image!r}; take one of {', '.join(CONTAINERS[1:])}", "slurm", "container")
    if image is not None and image.startswith("/"):
        ending = {"pyxis": ".sqsh", "apptainer": ".sif"}.get(container)
        if ending is None:
            yield setting_error(f"{image!r} is a file, but {container} takes an image by its name and tag", "task", "image")
        elif not image.endswith(ending):
            yield setting_error(f"{image!r} is not a file that {container} runs; those end in {ending}", "task", "image")


def _allocation(stack: Stack) -> Iterator[PydanticCustomError]:
    slurm, fleet = stack.slurm, stack.fleets[0]
    if slurm.gpu_type and not (fleet.gpu and fleet.gpu.count):
        yield setting_error(f"{slurm.gpu_type!r}, but fleets[0].gpu.count asks for no GPU", "slurm", "gpu_type")
    if slurm.time and seconds(slurm.time) < 2 * NOTICE:
        yield setting_error(
            f"{slurm.time!r} is short: jobs are asked to save {NOTICE} s before its end; take 10:00 or more", "slurm", "time"
        )
    if not slurm.exclusive and slurm.container in ("docker", "podman"):
        text = f"False, but {slurm.container} does not know which GPUs Slurm gave the job; take whole nodes, or pyxis or apptainer"
        yield setting_error(text, "slurm", "exclusive")
    if not slurm.exclusive:
        for key in ("cpus", "memory"):
            if getattr(fleet, key) is None:
                yield setting_error(f"is missing; {SHARED_NODES}", "fleets", 0, key)


def _options(stack: Stack) -> Iterator[PydanticCustomError]:
    for index, option in enumerate(stack.slurm.sbatch):
        if instead := OWN.get(option.removeprefix("--").partition("=")[0]):
            yield setting_error(f"{option} is set for you: {instead}", "slurm", "sbatch", index)


PLACE = Place(
    name="slurm",
    program="infra.slurm",
    errors=_errors,
    checkpoints=("shared",),
    settings=("slurm",),
    batch=True,
    start="sbatch build/slurm/ray-ppo.sbatch",
)
