"""python -m benchmarks.gpu.learners [--steps N] [--cpu] [kind ...]

Learners from data on one GPU, against TRL's trainers and a bare packed loop: tokens a second. Random weights of Qwen2.5-0.5B's shape in
bfloat16, 64 rows a step of long-tailed answers, micro-batches of 16,384 tokens; TRL pads 16 rows as they come, as its packing needs the
package flash-attn. kind: sft, rm, dpo; all of them without one. --cpu: a small model on CPUs, to see that this script works.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.gpu.colocated import SMALL
from benchmarks.interleaved import Side
from benchmarks.learners import MICRO_BATCH, settings
from benchmarks.report import RESULTS
from trainer import models
from trainer.configs.sections import ModelConfig
from trainer.plan.shapes import SHAPES

KINDS = ("sft", "rm", "dpo")
SIDES = {"flotilla": {}, "bare": {}, "trl": {"micro_batch": MICRO_BATCH}}
ROWS, LONGEST = 512, 1000


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.learners", description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("--steps", type=int, default=6, help="of which the first is not counted")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("kinds", nargs="*", metavar="kind", help=", ".join(KINDS))
    args = parser.parse_args(argv)
    if args.steps < 2:
        parser.error(f"--steps {args.steps}: 2 or more")
    if unknown := [kind for kind in args.kinds if kind not in KINDS]:
        parser.error(f"kind {unknown[0]}: one of {', '.join(KINDS)}")
    if not args.cpu and not torch.cuda.is_available():
        print("error: torch sees no GPU; --cpu tries the script on CPUs", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="flotilla-gpu-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        model = export(Path(folder) / "model", cpu=args.cpu)
        shown = Table("tokens a second", *SIDES, "over TRL's", "over bare's", title="" if args.cpu else torch.cuda.get_device_name())
        for kind in args.kinds or KINDS:
            sides = {name: side(kind, name, model, folder, cpu=args.cpu) for name in SIDES}
            alone([*sides.values()], args.steps)
            rates = {name: 1 / side.per_token for name, side in sides.items()}
            ratios = (rates["flotilla"] / rates[name] for name in ("trl", "bare"))
            shown.add_row(kind, *(f"{value:,.0f}" for value in rates.values()), *(f"{ratio:.2f}" for ratio in ratios))
            print(kind, rates, flush=True)  # kept where a later kind fails
    Console(width=120).print(shown)
    return 0


def export(path: Path, *, cpu: bool) -> Path:
    """The model that all sides load, drawn once."""
    init = {"model_type": "qwen2", "tie_word_embeddings": True, **SMALL} if cpu else SHAPES["Qwen/Qwen2.5-0.5B"]
    config = ModelConfig(init=init, tokenizer="characters:0123456789=", dtype="float32" if cpu else "bfloat16")
    lm = models.load_lm(config, 0, torch.device("cpu"))
    models.export(lm, lm.state_dict(), models.load_tokenizer(config), path)
    return path


def alone(sides: list[Side], steps: int) -> None:
    """Start them side by side, and give each its steps before the next one takes the GPU's memory."""
    RESULTS.mkdir(exist_ok=True)
    try:
        for one in sides:
            one.launch()
        for one in sides:
            one.ready()
        for one in sides:
            one.turn(steps)
            one.stop()
    finally:
        for one in sides:
            one.process.kill()


def side(kind: str, name: str, model: Path, runs: str, *, cpu: bool) -> Side:
    on = {} if cpu else {"model.dtype": "bfloat16", "placement.gpus_per_rank": 1, "placement.threads": None}
    if not cpu and name != "trl":
        on |= {"model.attention": "varlen"}
    more = {"model.path": model, "model.tokenizer": None, "trainer.micro_batch_tokens": 16_384, **on}
    given = settings(kind, None, **more, **{"data.args": {"count": ROWS, "longest": LONGEST, "middle": 5.5}})
    made = Side(f"gpu learners {kind} {name}", f"benchmarks.learner_sides:{name}", {"kind": kind, "settings": given, **SIDES[name]})
    made.environment |= {"HF_HUB_OFFLINE": "1", "FLOTILLA_RUNS": runs}
    return made


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
