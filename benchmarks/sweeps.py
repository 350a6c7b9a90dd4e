"""A sweep of learning rates on the demo's task: successive halving against the full grid, over three seeds of the run.

Both are `python -m sweeps` on processes of this machine. What counts are the steps that all trials train, and whether both find the
same best setting: over the seeds, as neighbours in one seed are a few of 256 held-out prompts apart, and what that costs in each seed.
Trials go on from their checkpoints, so those of ASHA are also compared with the grid's, number by number.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import yaml

from benchmarks.report import RESULTS, Ratio, Report
from trainer.compare import compare
from trainer.metrics import read

ROOT = Path(__file__).resolve().parents[1]
RATES: tuple[str, ...] = ("1e-6", "3e-6", "1e-5", "3e-5", "1e-4", "3e-4", "1e-3", "3e-3", "1e-2")
STEPS, RUNG, SEEDS = 36, 6, (0, 1, 2)
SECONDS = 1800  # of one sweep
SETTINGS = (
    "rollout.engine=hf",
    "placement.processes=one",
    "placement.threads=1",
    "trainer.prompts_per_step=32",
    f"trainer.steps={STEPS}",
    f"trainer.eval_every={RUNG}",
    "trainer.checkpoint_every=100",
    "log.tensorboard=false",
    "log.plot=false",
)


@dataclass(frozen=True)
class Found:
    """What a sweep came to."""

    best: str  # learning rate
    steps: int  # that all trials trained
    runs: dict[str, Path]  # by learning rate
    rewards: dict[str, float]  # held out, after the last step, of those that came there


def call(arguments: list[str], runs: Path, log: str) -> None:
    RESULTS.mkdir(exist_ok=True)
    env = os.environ | {"FLOTILLA_RUNS": str(runs)}
    with (RESULTS / log).open("a") as output:
        subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, env=env, stdout=output, stderr=output, timeout=SECONDS, check=True)


def sweep(runs: Path, name: str, seed: int, *flags: str) -> Found:
    words = [f"optim.lr=[{','.join(RATES)}]", f"run.seed={seed}", *SETTINGS]
    call(["sweeps", "trainer/recipes/demo.yaml", *words, "--name", name, "--parallel", "2", *flags], runs, "sweeps.log")
    folders = [folder for folder in sorted(runs.glob(f"{name}-*")) if (folder / "run.yaml").exists()]
    by_rate = dict(zip(RATES, folders, strict=True))
    best = yaml.safe_load((runs / name / "best.yaml").read_text())["optim"]["lr"]
    steps = sum(max(row["step"] for row in read(folder)) for folder in folders)
    last = {rate: [row["eval_reward"] for row in read(folder) if row["step"] == STEPS] for rate, folder in by_rate.items()}
    rewards = {rate: values[0] for rate, values in last.items() if values}
    return Found(next(rate for rate in RATES if float(rate) == float(best)), steps, by_rate, rewards)


def differences(grid: Found, halving: Found) -> int:
    """Numbers of trials of the halving that are not those of the grid's, up to where each came."""
    different = 0
    for rate, folder in halving.runs.items():
        rows = read(folder)
        same = [row for row in read(grid.runs[rate]) if row["step"] <= max(row["step"] for row in rows)]
        different += sum(metric.different for metric in compare(same, rows))
    return different


def over_seeds(found: list[Found]) -> str:
    """The learning rate that is best in most seeds; of several, the one with the larger mean."""
    votes = Counter(each.best for each in found)
    mean = {rate: statistics.fmean(each.rewards.get(rate, 0.0) for each in found) for rate in votes}
    return max(votes, key=lambda rate: (votes[rate], mean[rate]))


def run() -> Report:
    found: dict[int, tuple[Found, Found]] = {}
    with tempfile.TemporaryDirectory(prefix="flotilla-sweeps-") as folder:
        runs = Path(folder)
        call(["trainer.train_sft", "--config", "trainer/recipes/demo-sft.yaml"], runs, "sweeps.log")
        for seed in SEEDS:
            grid = sweep(runs, f"grid-{seed}", seed)
            halving = sweep(runs, f"asha-{seed}", seed, "--stop", "asha", "--rung", str(RUNG))
            found[seed] = grid, halving
        different = sum(differences(*both) for both in found.values())
    ratios = [
        Ratio("steps of ASHA / steps of the full grid", max(h.steps / g.steps for g, h in found.values()), 0.4),
        Ratio(
            "another best setting over three seeds",
            over_seeds([g for g, _ in found.values()]) != over_seeds([h for _, h in found.values()]),
            0,
        ),
        Ratio("reward below the grid's best, worst seed", max(g.rewards[g.best] - h.rewards[h.best] for g, h in found.values()), 0.02),
        Ratio("numbers of ASHA's trials that differ from the grid's", different, 0),
    ]
    facts = {
        f"seed {seed}": ", ".join(
            f"{name} {each.steps} steps, best {each.best} with {each.rewards[each.best]:.3f}" for name, each in (("grid", g), ("ASHA", h))
        )
        for seed, (g, h) in found.items()
    }
    return Report("sweeps", ratios, facts, {seed: [(each.best, each.steps) for each in both] for seed, both in found.items()})  # pyright: ignore[reportArgumentType]
