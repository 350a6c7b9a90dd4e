"""Seconds per GRPO step, against a bare loop and against TRL, with either engine.

Sorting digits: 64 prompts x 8 answers of 9 tokens, the demo's own recipe. Long tail: a model with random weights over 51 tokens, of
which one ends the answer. It writes each with about the same probability, so lengths are geometric: 51 tokens in the mean, cut at 256,
five times as many, with the same weights, prompts, limits and dtype for all sides. The reward (the share of characters from a set)
says nothing about length and the learning rate is small, so lengths stay as they are; sides draw their own samples, so there they
compare by seconds per token of response over all steps.

A side is a process; sides take turns of a few steps, of which the first does not count (`benchmarks.interleaved`).
"""

from __future__ import annotations

import os
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.contenders import VLLM_ENVIRONMENT
from benchmarks.interleaved import Side, race
from benchmarks.report import RESULTS, Ratio, Report

ROOT = Path(__file__).resolve().parents[1]
RUNS = RESULTS / "runs"
ROUNDS, STEPS = 5, 5
LONG_ROUNDS, LONG_STEPS = 3, 3

SORT = [
    "--config",
    "trainer/recipes/demo.yaml",
    "trainer.steps=1000",
    "trainer.checkpoint_every=1000",
    "trainer.eval_prompts=0",
    "rollout.max_logprob_diff=null",
]
# Two processes work at once, so each takes one of two cores.
PIPELINED = ["rollout.mode=one_step", "placement.threads=1"]
LETTERS = string.ascii_lowercase + string.ascii_uppercase[:22]  # 48 and three special tokens
LONG = [
    *SORT,
    "data.path=benchmarks.step:letters",
    "data.args={}",
    "reward.function=benchmarks.step:vowels",
    "model.path=run:long",
    "rollout.max_new_tokens=256",
    "trainer.prompts_per_step=16",
    "optim.lr=1e-4",
]
LONG_MODEL = {
    "model_type": "qwen2",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,  # tied, it would repeat what it reads and never end
}


def letters(rows: int = 5000) -> list[dict[str, str]]:
    """Prompts of ten letters for the long tail."""
    return [{"prompt": "".join(LETTERS[(i * 7 + j * j * 11) % len(LETTERS)] for j in range(10)), "answer": ""} for i in range(rows)]


def vowels(text: str, row: dict[str, Any]) -> float:
    """Share of the first half of the alphabet."""
    return sum(letter in LETTERS[:24] for letter in text) / max(len(text), 1)


def side(name: str, contender: str, settings: list[str], **more: Any) -> Side:
    settings = [*settings, f"run.name={name.replace(' ', '-')}", "run.resume=never"]
    environment = {} if contender == "flotilla" else VLLM_ENVIRONMENT
    return Side(name, f"benchmarks.contenders:{contender}", {"settings": settings, **more}, environment)


def sides(engine: str) -> dict[str, Side]:
    """Of one engine on the sorting task."""
    settings = [*SORT, f"rollout.engine={engine}"]
    return {
        "flotilla": side(f"flotilla {engine}", "flotilla", settings),
        "pipelined": side(f"flotilla {engine} pipelined", "flotilla", [*settings, *PIPELINED]),
        "bare": side(f"bare {engine}", "bare", settings),
        "trl": side(f"trl {engine}", "trl", settings),
    }


def long_sides() -> dict[str, Side]:
    """Flotilla one step off with either engine, and what modes TRL has for the same work."""
    hf, vllm = [*LONG, "rollout.engine=hf"], [*LONG, "rollout.engine=vllm"]
    return {
        "flotilla hf": side("long flotilla hf", "flotilla", [*hf, *PIPELINED]),
        "flotilla vllm": side("long flotilla vllm", "flotilla", [*vllm, *PIPELINED]),
        "trl hf": side("long trl hf", "trl", hf),
        "trl hf micro": side("long trl hf micro", "trl", hf, micro_batch=16),
        "trl vllm": side("long trl vllm", "trl", vllm),
    }


def run() -> Report:
    prepare()
    hf, vllm, long = sides("hf"), sides("vllm"), long_sides()
    ratios: list[Ratio] = []
    for engine, limit, group in (("hf", 1.10, hf), ("vllm", 1.15, vllm)):
        race(list(group.values()), ROUNDS, STEPS)
        ratios += [
            Ratio(f"{engine}: step / bare loop", group["flotilla"].median / group["bare"].median, limit),
            Ratio(f"{engine}: step / TRL", group["flotilla"].median / group["trl"].median, 1.0),
            Ratio(f"{engine}: pipelined step / TRL", group["pipelined"].median / group["trl"].median, 0.75),
        ]
    race(list(long.values()), LONG_ROUNDS, LONG_STEPS)
    best = min((side for name, side in long.items() if name.startswith("trl")), key=lambda side: side.per_token)
    ours = min((side for name, side in long.items() if name.startswith("flotilla")), key=lambda side: side.per_token)
    ratios.append(Ratio(f"long tail: {ours.name} / {best.name}", ours.per_token / best.per_token, 0.5))
    everyone = [*hf.values(), *vllm.values(), *long.values()]
    draw([*hf.values(), *vllm.values()], RESULTS / "step.png")
    return Report(
        "step",
        ratios,
        facts={side.name: summary(side) for side in everyone} | {"learning curves": str((RESULTS / "step.png").relative_to(ROOT))},
        samples={side.name: [vars(step) for step in side.steps] for side in everyone},
    )


def summary(side: Side) -> str:
    """Median seconds, tokens per step and the reward along the way."""
    rewards = [side.steps[int(i * (len(side.steps) - 1) / 4)].reward for i in range(5)]
    return (
        f"{side.median:.3f} s, {side.tokens:.0f} tokens, {1 / side.per_token:,.0f} tokens/s, reward {' '.join(f'{r:.2f}' for r in rewards)}"
    )


def prepare() -> None:
    """Make both models where they are not there yet."""
    os.environ["FLOTILLA_RUNS"] = str(RUNS)
    os.chdir(ROOT)
    if not (RUNS / "demo-sft" / "model" / "config.json").exists():
        subprocess.run([sys.executable, "-m", "trainer.train_sft", "--config", "trainer/recipes/demo-sft.yaml"], check=True)
    if not (RUNS / "long" / "model").exists():
        subprocess.run([sys.executable, "-c", "from benchmarks import step; step.make_long_model()"], check=True)


def make_long_model() -> None:
    import torch

    from trainer import models
    from trainer.configs.sections import ModelConfig

    config = ModelConfig(init=LONG_MODEL, tokenizer=f"characters:{LETTERS}", dtype="float32")
    lm = models.load_lm(config, 0, torch.device("cpu"))
    models.export(lm, lm.state_dict(), models.load_tokenizer(config), RUNS / "long" / "model")


def draw(drawn: list[Side], path: Path) -> None:
    """Reward over the steps, one line per side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for side in drawn:
        axes.plot(range(1, len(side.steps) + 1), [step.reward for step in side.steps], label=side.name, linewidth=1.2)
    axes.set(xlabel="step", ylabel="mean reward", title="Sorting digits, the same model and prompts")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
