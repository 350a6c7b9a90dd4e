"""python -m benchmarks.gpu.sync [--rounds N]

A weight sync between two processes on one GPU: by CUDA IPC, which `placement.colocate` uses, and over gloo through CPU memory; against a
copy of the same bytes on the GPU. Tensors of Qwen2.5-1.5B's shapes in bfloat16, views of one flat tensor as ZeRO has them.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import statistics
import sys
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.gpu.colocated import QWEN_1_5B, timed
from trainer import models, weights
from trainer.cluster.actors import free_port
from trainer.configs.sections import ModelConfig

BUCKETS = {"ipc": math.inf, "gloo": 256 << 20}


def parameters() -> list[weights.Parameter]:
    init = {"model_type": "qwen2", "tie_word_embeddings": True, **QWEN_1_5B}
    lm = models.without_weights(ModelConfig(init=init, tokenizer="characters:0123456789s="))
    return [weights.Parameter(name, tuple(p.shape), "bfloat16") for name, p in lm.named_parameters()]


def views(plan: weights.Plan, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    return dict(weights.unflatten(flat, tuple(parameter for bucket in plan for parameter in bucket)))


def take(rendezvous: weights.Rendezvous, plan: weights.Plan, rounds: int, answers: Any) -> None:
    """Copy what comes into weights of its own."""
    device = torch.device("cuda", 0)
    group = weights.join(rendezvous, 1)
    flat = torch.zeros(sum(p.numel for bucket in plan for p in bucket), dtype=torch.bfloat16, device=device)
    own = views(plan, flat)
    for _ in range(rounds):
        for bucket in weights.receive(group, plan, device):
            copy: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]  # as rollout/hf.py does
            copy([own[name] for name, _ in bucket], [tensor for _, tensor in bucket])
        torch.cuda.synchronize()
        answers.put(float(flat.double().sum()))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.sync", description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("--rounds", type=int, default=8, help="of which the first is not counted")
    args = parser.parse_args(argv)
    if args.rounds < 2:
        parser.error(f"--rounds {args.rounds}: 2 or more")
    if not torch.cuda.is_available():
        print("error: torch sees no GPU", file=sys.stderr)
        return 2
    listed = parameters()
    flat = torch.randn(sum(p.numel for p in listed), dtype=torch.bfloat16, device="cuda")
    copy = timed(flat.clone, cpu=False)
    size = flat.numel() * 2
    title = f"{size / 1e9:.2f} GB in {len(listed)} tensors, {torch.cuda.get_device_name()}"
    shown = Table("", "seconds, median", "GB/s", "of the copy's", title=title)
    shown.add_row("copy on the GPU", f"{copy:.4f}", f"{size / copy / 1e9:.0f}", "1")
    for backend, bucket in BUCKETS.items():
        seconds = statistics.median(syncs(backend, weights.plan(listed, bucket), flat, args.rounds)[1:])
        shown.add_row(backend, f"{seconds:.4f}", f"{size / seconds / 1e9:.1f}", f"{copy / seconds:.3f}")
    Console(width=120).print(shown)
    return 0


def syncs(backend: Any, plan: weights.Plan, flat: torch.Tensor, rounds: int) -> list[float]:
    """Seconds of each, whose bytes the other process has afterwards."""
    rendezvous = weights.Rendezvous("127.0.0.1", free_port(), 2, 60, backend)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    other = context.Process(target=take, args=(rendezvous, plan, rounds, answers))
    other.start()
    try:
        group = weights.join(rendezvous, 0)
        table = views(plan, flat)
        seconds = []
        for _ in range(rounds):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            weights.send(group, plan, lambda names: [table[name] for name in names])
            seconds.append(time.perf_counter() - begin)
            if answers.get(timeout=60) != float(flat.double().sum()):
                raise RuntimeError(f"{backend}: the other process has other weights")
            flat.add_(0.01)
        other.join(60)
        return seconds
    finally:
        other.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
