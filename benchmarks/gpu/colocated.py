"""python -m benchmarks.gpu.colocated [--steps N] [--cpu] [key=value ...]

Seconds of a step by phase, of a run whose ranks and rollout engine take turns on one GPU; beside plain copies of the weights' bytes, on the
GPU, and to CPU memory and back. Random weights of Qwen2.5-1.5B's shape; further arguments are settings of train_ppo. --cpu: a small model
on CPUs, to see that this script works.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from trainer import models, train_ppo
from trainer.configs.ppo import PpoConfig
from trainer.metrics import read
from trainer.plan import memory

PHASES = ("generate", "reward", "turn", "score", "train", "sync")
QWEN_1_5B = {
    "hidden_size": 1536,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 8960,
    "vocab_size": 151_936,
}
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 128}
ROUNDS, WARM_UP = 10, 2


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.colocated", description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("--steps", type=int, default=12, help=f"of which the first {WARM_UP} are not counted")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("settings", nargs="*", metavar="key=value")
    args = parser.parse_args(argv)
    if args.steps <= WARM_UP:
        parser.error(f"--steps {args.steps}: more than {WARM_UP}")
    if not args.cpu and not torch.cuda.is_available():
        print("error: torch sees no GPU; --cpu tries the script on CPUs", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="flotilla-gpu-") as folder:
        os.environ["FLOTILLA_RUNS"] = folder
        config = train_ppo.read([*settings(args.steps, cpu=args.cpu), *args.settings])
        run = Path(folder) / "run"
        if code := train_ppo.train(config, run):
            return code
        rows = [row for row in read(run) if row["step"] > WARM_UP]
    Console().print(table(config, rows, cpu=args.cpu))
    return 0


def settings(steps: int, *, cpu: bool) -> list[str]:
    """Answers of random weights: long ones, all of about the same length."""
    init = {"model_type": "qwen2", "tie_word_embeddings": True, **(SMALL if cpu else QWEN_1_5B)}
    sizes = {"rollout.max_new_tokens": 16 if cpu else 1024, "trainer.prompts_per_step": 8 if cpu else 32}
    on = ["placement.gpus_per_rank=0", "model.dtype=float32"] if cpu else ["model.gradient_checkpointing=true"]
    return [
        *(f"model.init.{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in init.items()),
        *("model.tokenizer=characters:0123456789s=", "data.path=trainer.data.tasks:sort_digits", "data.max_prompt_tokens=16"),
        *("reward.function=digits_share", "algorithm.group_size=8", "algorithm.kl.coef=0.001", "rollout.max_logprob_diff=null"),
        *("placement.colocate=true", "trainer.zero_stage=2", "trainer.eval_prompts=0", "trainer.checkpoint_every=1000000"),
        *(f"trainer.steps={steps}", "log.tensorboard=false", "log.plot=false"),
        *(f"{key}={value}" for key, value in sizes.items()),
        *on,
    ]


def table(config: PpoConfig, rows: list[dict[str, float]], *, cpu: bool) -> Table:
    shown = Table("of a step", "seconds, median", title="ranks and rollout engine take turns")
    for name in ("seconds", *(f"seconds_{phase}" for phase in PHASES)):
        shown.add_row(name, f"{statistics.median(row[name] for row in rows):.3f}")
    count = memory.Shape.of(models.without_weights(config.model)).parameters
    size = count * (4 if config.model.dtype == "float32" else 2)
    device = torch.device("cpu" if cpu else "cuda")
    there = torch.empty(size, dtype=torch.uint8, device=device)
    here = torch.empty(size, dtype=torch.uint8, pin_memory=not cpu)
    shown.add_section()
    shown.add_row(f"copy of {size / 2**30:.2f} GiB on the device", f"{timed(there.clone, cpu=cpu):.3f}")
    shown.add_row("to CPU memory and back", f"{timed(lambda: there.copy_(here.copy_(there)), cpu=cpu):.3f}")
    return shown


def timed(call: Callable[[], object], *, cpu: bool) -> float:
    """Median seconds of a call that a device may end later."""
    seconds = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        call()
        if not cpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
