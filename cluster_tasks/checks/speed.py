"""One process of a bandwidth test, of which each GPU has one, or each node where there are no GPUs; links.py starts it.

Prints a line of JSON: GB/s (1e9 bytes) of bus bandwidth in an all-reduce, counted as NCCL's tests do it
(https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md), GB/s to the process `stride` ranks further, and the version of the
library that did it on GPUs: NCCL's, or RCCL's where torch is one for ROCm.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

if __name__ == "__main__":  # before imports that this environment may not have
    from stacks.host.extras import explain_missing

    explain_missing()

import torch
import torch.distributed as dist
from torch.cuda import nccl

BYTES = {"cuda": 512 * 2**20, "cpu": 16 * 2**20}
MOST = 200  # repetitions
START_SECONDS = 60


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m cluster_tasks.checks.speed")
    for flag, kind in (("meet", str), ("device", str), ("world", int), ("rank", int), ("local-rank", int), ("stride", int)):
        parser.add_argument(f"--{flag}", type=kind, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="of each of the two measurements")
    options: Any = parser.parse_args()
    device = torch.device("cuda", options.local_rank) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, init_method=options.meet, rank=options.rank, world_size=options.world, timeout=timedelta(seconds=START_SECONDS)
    )
    size = BYTES[device.type]
    sent, received = (torch.ones(size // 4, device=device) for _ in range(2))
    to, source = (options.rank + options.stride) % options.world, (options.rank - options.stride) % options.world

    def shift() -> None:
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, to), dist.P2POp(dist.irecv, received, source)]):
            work.wait()

    all_reduce = size / seconds_of(lambda: dist.all_reduce(received), device, options.seconds) / 1e9
    point_to_point = size / seconds_of(shift, device, options.seconds) / 1e9
    library = ".".join(map(str, nccl.version())) if device.type == "cuda" else ""
    bus = all_reduce * 2 * (options.world - 1) / options.world
    print(json.dumps({"all_reduce": bus, "point_to_point": point_to_point, "library": library}))
    dist.destroy_process_group()


def seconds_of(step: Callable[[], Any], device: torch.device, about: float) -> float:
    """Mean seconds of a step, repeated for `about` so long; all ranks repeat it as often as rank 0 says."""
    step()  # connections are made by the first

    def timed(count: int) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / count

    count = torch.tensor([min(max(about / max(timed(1), 1e-6), 1), MOST)], device=device)
    dist.broadcast(count, 0)
    return timed(int(count.item()))


if __name__ == "__main__":
    main()
