"""Learners from data against TRL's trainers and a bare packed loop, and adapters against full fine-tuning: seconds a row, bytes of a sync.

Long-tailed answers, a model of 0.4 million weights in float32, 64 rows a step, 2 threads, in turns. TRL pads, as its packing needs flash
attention to keep sequences apart; its micro-batches are 16 rows as they come.
"""

from __future__ import annotations

from typing import Any

from benchmarks.interleaved import Side, race
from benchmarks.packing import MODEL
from benchmarks.report import RESULTS, Ratio, Report
from trainer import models
from trainer.configs.sections import ModelConfig
from trainer.plan.shapes import SHAPES

ROWS, LONGEST, EACH, MICRO_BATCH = 1024, 480, 64, 16
ROUNDS, STEPS = 3, 4
AGAINST_TRL, AGAINST_BARE, ADAPTERS, BYTES = 2.0, 0.95, 0.6, 0.1
WIDE = {**MODEL, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4}
RANK = 16


def settings(name: str, model: dict[str, Any] | None = MODEL, **more: Any) -> list[str]:
    values = {
        "run.name": name,
        "run.resume": "never",
        "model.init": model,
        "model.tokenizer": "characters:0123456789=",
        "model.dtype": "float32",
        "data.path": "benchmarks.learner_sides:rows",
        "data.args": {"count": ROWS, "longest": LONGEST},
        "data.max_prompt_tokens": 16,
        "optim.lr": 1e-4,
        "trainer.prompts_per_step": EACH,
        "trainer.micro_batch_tokens": 8192,
        "placement.gpus_per_rank": 0,
        "placement.threads": 2,
        **more,
    }
    return [f"{key}={'null' if value is None else value}" for key, value in values.items()]


def compare(kind: str) -> dict[str, Side]:
    given = settings(kind)
    sides = {
        "flotilla": Side(f"learners {kind}", "benchmarks.learner_sides:flotilla", {"kind": kind, "settings": given}),
        "bare": Side(f"learners {kind} bare", "benchmarks.learner_sides:bare", {"kind": kind, "settings": given}),
        "trl": Side(f"learners {kind} trl", "benchmarks.learner_sides:trl", {"kind": kind, "settings": given, "micro_batch": MICRO_BATCH}),
    }
    for side in sides.values():
        side.environment |= {"HF_HUB_OFFLINE": "1", "FLOTILLA_RUNS": str(RESULTS / "runs")}
    race([*sides.values()], ROUNDS, STEPS)
    return sides


def adapters() -> dict[str, Side]:
    """A step of all weights, and of adapters, on a model whose weights matter beside its activations."""
    sides = {}
    for name, more in (("full", {}), ("lora", {"model.lora.rank": RANK})):
        given = settings(name, WIDE, **{"trainer.prompts_per_step": 8, **more})
        sides[name] = Side(f"learners {name}", "benchmarks.learner_sides:flotilla", {"kind": "sft", "settings": given})
        sides[name].environment |= {"FLOTILLA_RUNS": str(RESULTS / "runs")}
    race([*sides.values()], ROUNDS, STEPS)
    return sides


def sync_bytes() -> float:
    """Of adapters over all weights, of Qwen2.5-1.5B: what the plan of a weight sync sends."""
    whole = ModelConfig.model_validate({"init": SHAPES["Qwen/Qwen2.5-1.5B"], "tokenizer": "characters:a"})
    lm = models.without_weights(whole.model_copy(update={"lora": whole.lora.model_copy(update={"rank": RANK})}))
    sizes = [(p.numel(), p.requires_grad) for p in lm.parameters()]
    return sum(size for size, trained in sizes if trained) / sum(size for size, trained in sizes if not trained)


def run() -> Report:
    ratios, facts, samples = [], {}, {}
    for kind in ("sft", "rm", "dpo"):
        sides = compare(kind)
        own = sides["flotilla"].per_token
        ratios += [
            Ratio(f"{kind}: tokens a second over TRL's", sides["trl"].per_token / own, AGAINST_TRL, "at least"),
            Ratio(f"{kind}: tokens a second over a bare packed loop's", sides["bare"].per_token / own, AGAINST_BARE, "at least"),
        ]
        facts[f"{kind}: seconds a step"] = "  ".join(f"{name} {side.median:.2f}" for name, side in sides.items())
        samples[kind] = {name: [step.seconds for step in side.steps] for name, side in sides.items()}
    sides = adapters()
    ratios.append(Ratio("adapters: seconds of a step over all weights'", sides["lora"].per_token / sides["full"].per_token, ADAPTERS))
    ratios.append(Ratio(f"adapters of rank {RANK}: bytes of a sync, Qwen2.5-1.5B", sync_bytes(), BYTES))
    samples["adapters"] = {name: [step.seconds for step in side.steps] for name, side in sides.items()}
    return Report("learners", ratios, facts, samples)
