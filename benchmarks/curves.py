"""What the algorithms learn of the demo's task: reward of held-out prompts after a few dozen steps, with three seeds each.

All start from the same supervised model, and each is the demo's recipe (trainer/recipes/demo.yaml) with the settings of `VARIANTS`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import ray

from benchmarks.report import Ratio, Report
from trainer import train_ppo
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


def run() -> Report:
    os.environ["RAY_AUTH_MODE"] = "disabled"
    curves: dict[str, list[list[float]]] = {}
    begins: dict[str, list[float]] = {}
    ends: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="flotilla-curves-") as runs:
        folder = Path(runs)
        warm_start = [sys.executable, "-m", "trainer.train_sft", "--config", "trainer/recipes/demo-sft.yaml"]
        subprocess.run(warm_start, env=os.environ | {"FLOTILLA_RUNS": runs}, check=True)
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        try:
            for name, settings in VARIANTS.items():
                for seed in SEEDS:
                    rows = learn(folder / "demo-sft" / "model", folder / "run", seed, settings)
                    curves.setdefault(name, []).append([row["reward"] for row in rows if "reward" in row])
                    begins.setdefault(name, []).append(rows[0][EVALUATED])
                    ends.setdefault(name, []).append(rows[-1][EVALUATED])
        finally:
            ray.shutdown()
    return Report(
        "curves",
        [
            Ratio(f"{name}: reward at the end, lowest of {len(SEEDS)} seeds", min(values), REACHED, "at least")
            for name, values in ends.items()
        ],
        facts={name: f"{shown(begins[name])} -> {shown(values)}" for name, values in ends.items()},
        samples={"settings": VARIANTS, "mean reward of each step": curves, "begin": begins, "end": ends},
    )


def shown(values: list[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def learn(model: Path, folder: Path, seed: int, settings: tuple[str, ...]) -> list[dict[str, float]]:
    """The rows of metrics of one run."""
    words = [f"model.path={model}", f"run.seed={seed}", "run.name=curve", *settings]
    config = parse(["--config", "trainer/recipes/demo.yaml", *words], prog="benchmarks.curves", model=PpoConfig)
    if train_ppo.train(config, folder):
        raise RuntimeError(f"a run with {' '.join(settings)} failed")
    rows = read(folder)
    shutil.rmtree(folder)  # its checkpoints
    return rows
