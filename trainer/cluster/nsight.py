"""Processes of a run under NVIDIA's Nsight Systems (`log.trace.with: [nsys]`), as Ray starts them. Runs in the driver.

https://docs.ray.io/en/latest/ray-observability/user-guides/profiling.html
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trainer.errors import ConfigError

LOOK_SECONDS = 120  # for each node to start a process that looks


def options(name: str) -> dict[str, str]:
    """Of `nsys profile`: what the process does between the start and the stop of the CUDA profiler, a report for each time.

    Reports are among Ray's logs on the process's node, in the folder nsight.
    """
    return {
        "t": "cuda,cudnn,cublas,nvtx,osrt",
        "o": f"'{name}-%p'",
        "capture-range": "cudaProfilerApi",
        "capture-range-end": "repeat",
        "stop-on-exit": "true",
    }


def require(nodes: list[dict[str, Any]]) -> None:
    """Raises ConfigError where a node with GPUs, of those that `ray.nodes()` lists, cannot start a process under nsys."""
    looks = {}
    remote: Any = ray.remote
    for node in nodes:
        if node["Alive"] and node["Resources"].get("GPU"):
            place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            looks[node["NodeManagerAddress"]] = remote(missing).options(num_cpus=0, scheduling_strategy=place).remote()
    found = zip(looks, ray.get([*looks.values()], timeout=LOOK_SECONDS), strict=True)
    if lines := [f"log.trace.with=nsys: {why} on node {address}; or leave nsys out" for address, why in found if why]:
        raise ConfigError("\n".join(lines))


def missing() -> str:
    """What this node has not."""
    if shutil.which("nsys") is None:
        return "nsys is not on PATH: install Nsight Systems"
    python = shutil.which("python")
    if python is None or Path(python).parent != Path(sys.executable).parent:  # which Ray starts under nsys by that name
        return f"python on PATH is {python or 'missing'}, Ray's is {sys.executable}: put its folder first on PATH"
    return ""
