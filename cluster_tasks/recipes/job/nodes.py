"""torchrun on every node of the Ray cluster: SFT, reward models and DPO need no scheduler of their own."""

from __future__ import annotations

import logging
import shlex
import socket
import time
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster_tasks.recipes.job import process
from cluster_tasks.recipes.job.process import JobError, say

LOST = 75  # as the node agent's
JOIN_SECONDS = 600
POLL = 0.5


class Node:
    """One node's torchrun; a Ray actor that has the node's GPUs."""

    def __init__(self) -> None:
        self.process: Any = None

    def address(self) -> tuple[str, int]:
        """Of this node, with a port that is free now."""
        address = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((address, 0))
            return address, probe.getsockname()[1]

    def start(self, command: list[str]) -> None:
        self.process = process.start(command)

    def poll(self) -> int | None:
        code = self.process.poll()
        return 128 - code if code is not None and code < 0 else code

    def stop(self, seconds: float) -> None:
        process.end(self.process, seconds)


def torchrun(command: list[str], nodes: int, gpus: int) -> int:
    """The exit code of the first node that fails, which ends all; 0 where none does. Raises JobError."""
    ray.init(logging_level=logging.WARNING)
    bundle: dict[str, float] = {"CPU": 1, **({"GPU": gpus} if gpus else {})}
    group = placement_group([bundle] * nodes, strategy="STRICT_SPREAD" if nodes > 1 else "PACK")
    if not group.wait(JOIN_SECONDS):
        raise JobError(
            f"no {nodes} nodes with {gpus} free GPUs each within {JOIN_SECONDS} s; another job may have them: `flotilla status STACK`"
        )
    try:
        return _run([_node(group, index, gpus) for index in range(nodes)], command, gpus)
    except RayError as error:
        raise JobError(f"a node of torchrun is lost: {str(error).splitlines()[0]}", LOST) from None
    finally:
        remove_placement_group(group)


def _node(group: Any, index: int, gpus: int) -> Any:
    where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
    return ray.remote(Node).options(num_cpus=1, num_gpus=gpus, scheduling_strategy=where).remote()


def _run(actors: list[Any], command: list[str], gpus: int) -> int:
    address, port = ray.get(actors[0].address.remote())
    flags = [f"--nnodes={len(actors)}", f"--nproc-per-node={max(gpus, 1)}", f"--master-addr={address}", f"--master-port={port}"]
    say(f"$ torchrun {shlex.join([*flags, '--node-rank=...', *command])}   on {len(actors)} nodes")
    try:
        ray.get([actor.start.remote(["torchrun", *flags, f"--node-rank={rank}", *command]) for rank, actor in enumerate(actors)])
        while None in (codes := ray.get([actor.poll.remote() for actor in actors])):
            if any(codes):
                break
            time.sleep(POLL)
    except BaseException:
        _stop(actors)
        raise
    rank = next((rank for rank, code in enumerate(codes) if code), None)
    if rank is None:
        return 0
    say(f"torchrun of node {rank} ended with exit code {codes[rank]}; ending the others")
    _stop(actors)
    return codes[rank]


def _stop(actors: list[Any]) -> None:
    seconds = process.stop_seconds()
    ray.wait([actor.stop.remote(seconds) for actor in actors], num_returns=len(actors), timeout=seconds + process.MARGIN)
