"""How a node's command gets into task.image under Slurm: Pyxis, Apptainer, Docker or Podman; or not at all.

Docker and Podman start containers that Slurm does not know, and does not end. Each is named after job and node, so that the next start
of the job removes what is left, and ends with its client, whose standard input its agent watches (cluster_tasks/node/lifeline.py).
The project's folder and the checkpoints are mounted where they are, so that paths are the same inside and outside. Variables are
handed on by name: no value, and so no secret, stands in a command line.

Sources:
https://github.com/NVIDIA/pyxis/wiki/Usage (options of srun), https://apptainer.org/docs/user/latest/gpu.html (--nv, --rocm)
https://rocm.docs.amd.com/projects/install-on-linux/en/latest/how-to/docker.html (devices, groups, ptrace)
https://docs.podman.io/en/latest/markdown/podman-run.1.html (--userns keep-id, keep-groups), https://github.com/cncf-tags/container-device-interface
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass

from stacks.schema import Fleet, Stack

HOME = "/tmp"  # in Docker and Podman, where the user's own, with its keys, is not mounted
# Of what Slurm sets, what the node agent reads.
SLURM_VARIABLES = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_RESTART_COUNT", "SLURMD_NODENAME", "SLURM_GPUS_ON_NODE")


@dataclass(frozen=True)
class Container:
    """Bash: lines that come first, words after `srun`, words before the command; flags of the agent, and what each step reads."""

    lines: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    stdin: str = ""


def container(stack: Stack, fleet: Fleet, names: Iterable[str]) -> Container:
    """What runs a command in task.image on each node; `names` are the variables that it needs."""
    makers = {"none": _none, "pyxis": _pyxis, "apptainer": _apptainer, "docker": _engine, "podman": _engine}
    return makers[stack.slurm.container](stack, fleet, (*names, *SLURM_VARIABLES))


def _none(stack: Stack, fleet: Fleet, names: tuple[str, ...]) -> Container:
    return Container()


def _pyxis(stack: Stack, fleet: Fleet, names: tuple[str, ...]) -> Container:
    options = (
        f"--container-image={shlex.quote(stack.task.image or '')}",
        f'"--container-mounts={",".join(_mounts(stack))}"',
        '"--container-workdir=$PWD"',
        f'"--container-env={",".join(names)}"',  # else the image's own values win
    )
    return Container(options=options)


def _apptainer(stack: Stack, fleet: Fleet, names: tuple[str, ...]) -> Container:
    image = stack.task.image or ""
    source = shlex.quote(image if image.startswith("/") else f"docker://{image}")
    gpus = {"nvidia": ("--nv",), "amd": ("--rocm",)}[fleet.gpu.vendor] if fleet.gpu and fleet.gpu.count else ()
    return Container(prefix=("apptainer", "exec", *gpus, f'"--bind={",".join(_mounts(stack))}"', '"--pwd=$PWD"', source))


def _engine(stack: Stack, fleet: Fleet, names: tuple[str, ...]) -> Container:
    """Docker and Podman take the same words, but for the user and NVIDIA's GPUs."""
    engine, podman = stack.slurm.container, stack.slurm.container == "podman"
    vendor = fleet.gpu.vendor if fleet.gpu and fleet.gpu.count else None
    words = [
        *("bash", "-c", '"$node"', '"flotilla-$SLURM_JOB_ID"'),
        "--rm",
        "--interactive",
        "--network=host",
        f"--shm-size={stack.task.shm_size.lower().removesuffix('b')}" if stack.task.shm_size else "--ipc=host",
        "--ulimit=memlock=-1",  # RDMA pins memory
        "--ulimit=stack=67108864",
        # Files belong to who submits. Of root alone Podman keeps the id by itself, and refuses to be asked for it.
        '"--userns=$([ "$(id -u)" = 0 ] || echo keep-id)"' if podman else '"--user=$(id -u):$(id -g)"',
        *(f'"--volume={mount}"' for mount in _mounts(stack)),
        '"--workdir=$PWD"',
        f"--env=HOME={HOME}",
        '"--env=USER=$(id -un)"',  # a uid without a name is none that PyTorch's caches take
        *(f"--env={name}" for name in names),
        shlex.quote(stack.task.image or ""),
    ]
    devices = {None: "", "nvidia": "--device=nvidia.com/gpu=all" if podman else "--gpus=all", "amd": AMD_OPTIONS}[vendor]
    lines = [
        "node=$(cat <<'END' # on each node",
        "name=$0-$SLURMD_NODENAME",
        f'{engine} rm --force "$name" >/dev/null 2>&1 # what an earlier start of the job has left',
        f"devices=({devices})",
        "if [ -e /dev/infiniband ]; then devices+=(--device=/dev/infiniband); fi",
        *(AMD_LINES if vendor == "amd" else ()),
        f'exec {engine} run "--name=$name" "${{devices[@]}}" "$@"',
        "END",
        ")",
        "exec 3<> <(:) # ends with the steps that read it, and containers with their standard input",
    ]
    return Container(lines=tuple(lines), prefix=tuple(words), flags=("--end-with-stdin",), stdin=" <&3")


# ptrace, which RCCL needs to map another process's memory, and unconfined NUMA calls: as AMD's page on Docker says.
AMD_OPTIONS = "--device=/dev/kfd --device=/dev/dri --cap-add=SYS_PTRACE --security-opt=seccomp=unconfined"
# By number: the groups video and render, which own the devices, may be unknown to the image, or other numbers there.
AMD_LINES = (
    '[ -e /dev/kfd ] || { echo "error: $SLURMD_NODENAME has no /dev/kfd: no AMD GPU, or its driver is not loaded" >&2; exit 2; }',
    "mapfile -t groups < <(stat -c %g /dev/kfd /dev/dri/render* | sort -u)",
    'devices+=("${groups[@]/#/--group-add=}")',
)


def _mounts(stack: Stack) -> list[str]:
    """host:container, in bash words inside of double quotes."""
    shared = [str(path) for path in (stack.checkpoints.path, stack.cache.path) if path]
    return ["$PWD:$PWD", *(f"{path}:{path}" for path in shared), *stack.task.volumes]
