"""python3 burn_in.py SECONDS [--cpu]: do the GPUs of this machine keep, compute and send what they should? A program of its own.

The node agent runs it before Ray starts (`--burn-in`), with the torch of the node's image, which the agent itself does not import. Rounds
of three parts, all GPUs at once, until the seconds are over and at least one: patterns written to nearly all free memory and read back;
one product of matrices again and again, each time with the same bits; an all-reduce among the GPUs. Prints one line of JSON, `errors`
among it. Exit code 0 where it has none, 1 where it has some, 2 where nothing could be looked at.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

BLOCK = 1 << 28  # numbers of 32 bits: 1 GiB
FULL = 0.9  # of the free memory; the rest is for reading back, and for the matrices
PATTERNS = (0x55555555, -0x55555556)  # each bit is 1 in one of them and 0 in the other
PART_SECONDS = 5.0  # of the matrices, in a round
SLOW = 0.8  # of what the node's GPUs compute in the median
CPU_NUMBERS, CPU_SIZE, GPU_SIZE = 1 << 24, 512, 8192  # of memory; rows of matrices


def changed(torch: Any, device: Any, numbers: int) -> int:
    """How many of these numbers come back from memory as others."""
    wrong, blocks = 0, []
    try:
        while numbers > 0:
            blocks.append(torch.empty(min(numbers, BLOCK), dtype=torch.int32, device=device))
            numbers -= BLOCK
        for pattern in PATTERNS:
            for index, block in enumerate(blocks):
                block.fill_(pattern ^ index)
            wrong += sum(differing(block, pattern ^ index) for index, block in enumerate(blocks))
    finally:
        blocks.clear()
    return wrong


def differing(block: Any, pattern: int) -> int:
    """Numbers of a block that are not the pattern; an eighth at a time, as the comparison takes memory itself."""
    return sum(int((part != pattern).sum()) for part in block.chunk(8))


def product(torch: Any, device: Any, seconds: float) -> tuple[int, float]:
    """How often a product differs from the first one, and TFLOP/s."""
    gpu = device.type != "cpu"
    size, dtype = (GPU_SIZE, torch.bfloat16) if gpu else (CPU_SIZE, torch.float32)
    draw = torch.Generator(device=device).manual_seed(0)
    left, right = (torch.randn(size, size, generator=draw, device=device, dtype=dtype) for _ in range(2))
    first, wrong, count = left @ right, 0, 0
    int(first.isnan().sum())  # waits for the GPU, as `equal` does
    begin = time.perf_counter()
    while count == 0 or time.perf_counter() - begin < seconds:
        results = [left @ right for _ in range(8)]
        wrong += sum(not torch.equal(result, first) for result in results)
        count += len(results)
    return wrong, count * 2 * size**3 / (time.perf_counter() - begin) / 1e12


def all_reduce(torch: Any, devices: list[Any], numbers: int = 1 << 26) -> tuple[str, float]:
    """What is wrong with a sum over all GPUs, and GB/s of each one's links: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md"""
    parts = [torch.full((numbers,), float(rank + 1), device=device) for rank, device in enumerate(devices)]
    torch.cuda.nccl.all_reduce(parts)  # makes the connections
    for rank, part in enumerate(parts):
        part.fill_(float(rank + 1))
        torch.cuda.synchronize(part.device)
    begin = time.perf_counter()
    torch.cuda.nccl.all_reduce(parts)
    for device in devices:
        torch.cuda.synchronize(device)
    seconds, count = time.perf_counter() - begin, len(devices)
    bad = [str(rank) for rank, part in enumerate(parts) if bool((part != count * (count + 1) / 2).any())]
    return (f"GPU {', '.join(bad)}: a wrong sum" if bad else ""), 2 * (count - 1) / count * numbers * 4 / seconds / 1e9


def device_round(torch: Any, device: Any, seconds: float) -> tuple[list[str], float]:
    """The two parts of one GPU; errors, and TFLOP/s."""
    numbers = CPU_NUMBERS
    try:
        if device.type != "cpu":
            torch.cuda.set_device(device)
            torch.cuda.empty_cache()
            numbers = int(torch.cuda.mem_get_info()[0] * FULL) // 4
        lost = changed(torch, device, numbers)
        if device.type != "cpu":
            torch.cuda.empty_cache()
        wrong, speed = product(torch, device, seconds)
    except RuntimeError as error:  # a GPU that is lost, an uncorrectable error of its memory
        return [f"{str(error).strip().splitlines()[0]}"], 0.0
    errors = [f"{lost:,} numbers of {numbers:,} came back from memory changed"] if lost else []
    return errors + ([f"{wrong} of its products of matrices differ from the first"] if wrong else []), speed


def slow(speeds: list[float]) -> list[int]:
    """GPUs that compute less than their neighbours: too hot, or short of power."""
    usual = statistics.median(speeds)
    return [index for index, speed in enumerate(speeds) if 0 < speed < SLOW * usual]


def burn_in(torch: Any, devices: list[Any], seconds: float) -> dict[str, Any]:
    """Rounds until the seconds are over, or something is wrong."""
    end, rounds, errors, speeds, bandwidth = time.monotonic() + seconds, 0, [], [0.0] * len(devices), None
    names = [f"GPU {device.index} ({torch.cuda.get_device_name(device)})" if device.type != "cpu" else "CPU" for device in devices]
    with ThreadPoolExecutor(len(devices)) as threads:
        while not errors and (rounds == 0 or time.monotonic() < end):
            part = min(PART_SECONDS, seconds)  # the last one too, as speeds of an instant differ
            found = list(threads.map(lambda device, part=part: device_round(torch, device, part), devices))
            errors += [f"{name}: {line}" for name, (lines, _) in zip(names, found, strict=True) for line in lines]
            speeds = [speed for _, speed in found]
            if len(devices) > 1 and not errors:
                wrong, bandwidth = all_reduce(torch, devices)
                errors += [f"all-reduce: {wrong}"] if wrong else []
            rounds += 1
    usual = statistics.median(speeds)
    errors += [
        f"{names[index]}: {speeds[index]:.0f} TFLOP/s, where the median here is {usual:.0f}: too hot, or short of power"
        for index in slow(speeds)
    ]
    return {"errors": errors, "rounds": rounds, "devices": names, "tflops": speeds, "bandwidth": bandwidth}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="burn_in.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("seconds", type=float)
    parser.add_argument("--cpu", action="store_true", help="this machine's CPUs, whatever GPUs it has")
    options = parser.parse_args(argv)
    # Its modules are named as it suits the agent, and torch shall not find them in place of others.
    sys.path[:] = [folder for folder in sys.path if Path(folder or ".").resolve() != Path(__file__).resolve().parent]
    try:
        import torch
    except ImportError as error:
        print(json.dumps({"errors": [f"torch cannot be imported: {error}"]}))
        return 2
    gpus = [] if options.cpu else [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    found = burn_in(torch, gpus or [torch.device("cpu")], options.seconds)
    print(json.dumps(found))
    return 1 if found["errors"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
