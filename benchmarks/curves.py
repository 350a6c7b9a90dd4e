"""What the algorithms learn of the demo's task: reward of held-out prompts after a few dozen steps, with three seeds each.

All start from the same supervised model, and each is the demo's recipe (trainer/recipes/demo.yaml) with the settings of `VARIANTS`.
Last comes PPO that never sees the task's own reward, but that of a model which has learned from pairs of answers; what it has learned is
measured by the task's own.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import ray

from benchmarks.report import Ratio, Report
from trainer import evaluate, train_ppo
from trainer.cli import parse
from trainer.configs.ppo import PpoConfig
from trainer.metrics import read

SEEDS = (0, 1, 2)
REACHED = 0.8
EVALUATED = "eval_reward"
# So that the losses differ: in a step's first optimizer step the ratio is 1. Two steps of half a batch want half the learning rate.
OFF_POLICY = ("algorithm.minibatches=2", "optim.lr=2.5e-4")
VARIANTS = {
    "GRPO": (),
    "Dr. GRPO": ("algorithm.name=dr_grpo",),
    "RLOO": ("algorithm.name=rloo",),
    "REINFORCE++": ("algorithm.name=reinforce_plus_plus", "algorithm.baseline=false"),
    "REINFORCE++, group baseline": ("algorithm.name=reinforce_plus_plus",),
    "ReMax": ("algorithm.name=remax",),
    "PPO": ("algorithm.name=ppo", "critic.lr=1e-3"),
    "GSPO": ("algorithm.loss=gspo", *OFF_POLICY),
    "CISPO": ("algorithm.loss=cispo", *OFF_POLICY),
    "SAPO": ("algorithm.loss=sapo", *OFF_POLICY),
    "GRPO of adapters": ("model.lora.rank=16", "optim.lr=2e-3"),
}
BY_A_MODEL = "PPO by a reward model"
# Of demo-rm's own pairs the rejected are never in order: a policy is then paid for any digits that are.
PAIRS = ("data.path=trainer.data.tasks:hard_pairs", "data.args.rows=40000", "trainer.steps=600", "optim.schedule=linear")


def run() -> Report:
    os.environ["RAY_AUTH_MODE"] = "disabled"
    curves: dict[str, list[list[float]]] = {}
    begins: dict[str, list[float]] = {}
    ends: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="flotilla-curves-") as runs:
        folder = Path(runs)
        for entry, settings in (("sft", ()), ("rm", PAIRS)):
            command = [sys.executable, "-m", f"trainer.train_{entry}", "--config", f"trainer/recipes/demo-{entry}.yaml", *settings]
            subprocess.run(command, env=os.environ | {"FLOTILLA_RUNS": runs}, check=True)
        model, rewards = folder / "demo-sft" / "model", f"{{model: {folder / 'demo-rm' / 'model'}, gpus: 0}}"
        variants = VARIANTS | {BY_A_MODEL: (*VARIANTS["PPO"], "reward.function=reward_model", f"reward.args={rewards}")}
        ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
        try:
            for name, settings in variants.items():
                for seed in SEEDS:
                    rows = learn(model, folder / "run", seed, settings)
                    curves.setdefault(name, []).append([row["reward"] for row in rows if "reward" in row])
                    own = name == BY_A_MODEL
                    begins.setdefault(name, []).append(worth(model) if own else rows[0][EVALUATED])
                    ends.setdefault(name, []).append(worth(folder / "run" / "model") if own else rows[-1][EVALUATED])
                    shutil.rmtree(folder / "run")
        finally:
            ray.shutdown()
    return Report(
        "curves",
        [
            Ratio(f"{name}: reward at the end, lowest of {len(SEEDS)} seeds", min(values), REACHED, "at least")
            for name, values in ends.items()
        ],
        facts={name: f"{shown(begins[name])} -> {shown(values)}" for name, values in ends.items()},
        samples={"settings": variants, "mean reward of each step": curves, "begin": begins, "end": ends},
    )


def shown(values: list[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def learn(model: Path, folder: Path, seed: int, settings: tuple[str, ...]) -> list[dict[str, float]]:
    """The rows of metrics of one run."""
    if train_ppo.train(demo(model, f"run.seed={seed}", "run.name=curve", *settings), folder):
        raise RuntimeError(f"a run with {' '.join(settings)} failed")
    return read(folder)


def worth(model: Path) -> float:
    """The task's own reward of a model's answers to the prompts that are held out."""
    return evaluate.run(demo(model), argparse.Namespace(endpoint=None, out=None, chat=False))[""][EVALUATED]


def demo(model: Path, *settings: str) -> PpoConfig:
    return parse(["--config", "trainer/recipes/demo.yaml", f"model.path={model}", *settings], prog="benchmarks.curves", model=PpoConfig)
