"""python -m benchmarks.gpu.training [--rounds N] [--cpu] [key=value ...]

An optimizer step on one GPU, by attention: seconds, tokens a second, the share of the GPU's peak arithmetic, and memory against the plan's.
Random weights of Qwen2.5-1.5B's shape, answers of long-tailed lengths up to 8,192 tokens; further arguments are settings of train_sft.
--cpu: a small model on CPUs, to see that this script works.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.gpu.colocated import QWEN_1_5B, SMALL
from trainer import models, train_sft
from trainer.cluster.actors import free_port
from trainer.configs.sections import ModelConfig
from trainer.data.packing import Sequence
from trainer.objectives.aggregation import denominators
from trainer.plan import gpus, memory, step_time
from trainer.ranks.worker import Worker

SIDES = {
    "sdpa": ["model.attention=sdpa", "model.gradient_checkpointing=true"],
    "varlen": ["model.attention=varlen", "model.gradient_checkpointing=true"],
    "varlen, nothing recomputed": ["model.attention=varlen", "trainer.micro_batch_tokens=8192"],
}
ON_CPU = {"sdpa": ["model.attention=sdpa", "model.gradient_checkpointing=true"], "eager": ["model.attention=eager"]}
SCORED = 8  # sequences whose log-probabilities the sides are compared by


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.training", description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("--rounds", type=int, default=5, help="optimizer steps, of which the first is not counted")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--only", choices=[*SIDES], help="one of the sides")
    parser.add_argument("--side", help=argparse.SUPPRESS)  # in a process of its own, as what a model leaves behind is memory
    parser.add_argument("settings", nargs="*", metavar="key=value")
    args = parser.parse_args(argv)
    if args.rounds < 2:
        parser.error(f"--rounds {args.rounds}: 2 or more")
    if not args.cpu and not torch.cuda.is_available():
        print("error: torch sees no GPU; --cpu tries the script on CPUs", file=sys.stderr)
        return 2
    if args.side:
        print(json.dumps(side(args.settings, args.rounds, cpu=args.cpu)))
        return 0
    with tempfile.TemporaryDirectory(prefix="flotilla-gpu-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        path = Path(folder) / "model"
        init = {"model_type": "qwen2", "tie_word_embeddings": True, **(SMALL if args.cpu else QWEN_1_5B)}
        dtype = "float32" if args.cpu else "bfloat16"
        config = ModelConfig(init=init, tokenizer="characters:0123456789s=", dtype=dtype)
        lm = models.load_lm(config, 0, torch.device("cpu"))
        models.export(lm, lm.state_dict(), models.load_tokenizer(config), path)
        settings = [f"model.path={path}", f"model.dtype={dtype}", *args.settings]
        sides = {args.only: SIDES[args.only]} if args.only else ON_CPU if args.cpu else SIDES
        found = {name: run([*settings, *more], args.rounds, name, cpu=args.cpu) for name, more in sides.items()}
    Console(width=120).print(table(found))
    return 0


def run(settings: list[str], rounds: int, name: str, *, cpu: bool) -> dict[str, Any]:
    words = ["--rounds", str(rounds), "--side", name, *(["--cpu"] if cpu else []), *settings]
    done = subprocess.run([sys.executable, "-m", "benchmarks.gpu.training", *words], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def side(settings: list[str], rounds: int, *, cpu: bool) -> dict[str, Any]:
    """Seconds of each step, log-probabilities of some answers, loss and norm of the first step, and memory."""
    longest = 64 if cpu else 8192
    config = train_sft.read(
        [
            *("data.path=trainer.data.tasks:sort_digits", f"data.max_prompt_tokens={longest // 2}"),
            *(f"trainer.micro_batch_tokens={4 * longest if cpu else 16384}", f"placement.gpus_per_rank={0 if cpu else 1}"),
            *("trainer.zero_stage=2", "optim.lr=1e-6", "trainer.checkpoint_every=1000000", "log.tensorboard=false", "log.plot=false"),
            *settings,
        ]
    )
    worker = Worker(config, train_sft.Sft(config).role(), 0, 1, None, None)
    worker.start("127.0.0.1", free_port())
    sequences = long_tailed(16 if cpu else 64, longest)
    lengths_E = torch.tensor([len(s.response_ids) for s in sequences])
    mask_N = torch.ones(int(lengths_E.sum()))
    counts = denominators(mask_N, torch.repeat_interleave(torch.arange(len(sequences)), lengths_E), len(sequences))
    scores = worker.score(sequences[:SCORED], 0)
    seconds, stats = [], []
    for _ in range(rounds):
        begin = time.perf_counter()
        stats.append(worker.optimizer_step(sequences, {"mask": mask_N}, counts, 0))
        if not cpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    turns = {}
    if not cpu:
        for name in ("offload", "reload"):
            begin = time.perf_counter()
            getattr(worker, name)()
            torch.cuda.synchronize()
            turns[name] = time.perf_counter() - begin
    torch.distributed.destroy_process_group()
    shape = memory.Shape.of(models.without_weights(config.model))
    parts = memory.plan(config, shape, 80e9, 1)[0][1]
    passes = 4 if config.model.gradient_checkpointing else 3
    work = passes * sum(s.length * step_time.flops_forward(shape, s.length) for s in sequences)
    return {
        "seconds": seconds,
        "tokens": sum(s.length for s in sequences),
        "work": work,
        "peak": 0 if cpu else torch.cuda.max_memory_allocated(),
        "planned": sum(size for name, size in parts.items() if name != "processes"),
        "real": stats[0]["real_tokens"] / stats[0]["padded_tokens"],
        "loss": stats[0]["loss"],
        "norm": stats[0]["grad_norm"],
        "scores": scores.tolist(),
        "gpu": "" if cpu else torch.cuda.get_device_name(),
        **turns,
    }


def long_tailed(count: int, longest: int) -> list[Sequence]:
    """Answers of about a sixth of the longest, in the median, after short prompts."""
    rng = random.Random(0)
    prompt = longest // 64
    lengths = [max(2, min(longest - prompt, round(rng.lognormvariate(0, 0.8) * longest / 6))) for _ in range(count)]
    return [Sequence([rng.randrange(3, 13) for _ in range(prompt)], [rng.randrange(3, 13) for _ in range(n)]) for n in lengths]


def table(found: dict[str, dict[str, Any]]) -> Table:
    first = next(iter(found.values()))
    shown = Table("", *found, title=f"an optimizer step of {first['tokens']:,} tokens {first['gpu']}")

    def row(name: str, of: Any) -> None:
        shown.add_row(name, *(of(side) for side in found.values()))

    row("seconds, median", lambda side: f"{statistics.median(side['seconds'][1:]):.3f}")
    row("tokens a second", lambda side: f"{side['tokens'] / statistics.median(side['seconds'][1:]):,.0f}")
    peaks = {gpu.name: gpu.flops for gpu in gpus.GPUS.values() if first["gpu"] and gpu.name in first["gpu"].split()}
    for name, flops in peaks.items():
        row(f"of the peak of {name}", lambda side, flops=flops: f"{side['work'] / statistics.median(side['seconds'][1:]) / flops:.2f}")
    row("real of all tokens", lambda side: f"{side['real']:.3f}")
    row("memory at most, GiB", lambda side: f"{side['peak'] / 2**30:.1f}")
    row("the plan's, GiB", lambda side: f"{side['planned'] / 2**30:.1f}")
    row("loss of the first step", lambda side: f"{side['loss']:.5f}")
    row("norm of its gradient", lambda side: f"{side['norm']:.5f}")
    scores = torch.tensor(first["scores"])
    row("log-probabilities, mean difference", lambda side: f"{(torch.tensor(side['scores']) - scores).abs().mean():.5f}")
    for name in ("offload", "reload"):
        if name in first:
            row(f"seconds of {name}", lambda side, name=name: f"{side[name]:.2f}")
    return shown


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
