"""This machine as the site: every node is a process tree, started by `python -m cluster_tasks.local`."""

from __future__ import annotations

from pathlib import Path

from stacks.load import StackError
from stacks.schema import Stack
from stacks.site import Site


def build(stack: Stack) -> Site:
    """Raises StackError where the nodes together have more GPUs than this machine."""
    have = gpus()
    for index, fleet in enumerate(stack.fleets):
        each = fleet.gpu.count if fleet.gpu else 0
        if fleet.nodes * each > have:
            raise StackError(
                f"stacks/Pulumi.{stack.name}.yaml: flotilla:fleets[{index}].gpu.count: {fleet.nodes} nodes with {each} GPUs each need "
                f"{fleet.nodes * each}, but this machine has {have}; lower it or nodes, or take a stack with flotilla:cloud ssh"
            )
    return Site()


def gpus(dev: Path = Path("/dev"), kfd: Path = Path("/sys/class/kfd/kfd/topology/nodes")) -> int:
    """GPUs of this machine, counted from what their kernel drivers show: NVIDIA's device files, or AMD's compute nodes."""
    nvidia = [file for file in dev.glob("nvidia[0-9]*") if file.name.removeprefix("nvidia").isdigit()]
    # A compute node of the AMD driver with no SIMD units is a processor.
    amd = [file for file in kfd.glob("*/properties") if "simd_count 0\n" not in file.read_text()]
    return len(nvidia) + len(amd)
