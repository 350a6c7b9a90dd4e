"""A run that diverges: what is skipped, when the weights are taken for ruined, and how the run goes back.

An optimizer step whose gradient is not finite, or longer than divergence.grad_norm, changes no weights (`engine.py`). Once the weights
themselves give no numbers, or divergence.patience steps in a row were skipped, the run goes back to the newest checkpoint from before
the step that made those weights, with a lower learning rate. rollbacks.jsonl in the run's folder says when and why, and is what a
resumed run knows its learning rate by.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from trainer.checkpoints.folders import Checkpoints
from trainer.configs.sections import Config
from trainer.errors import RunError
from trainer.runs import ROLLBACKS

RUINED = "the model's probabilities are not numbers"
C = TypeVar("C", bound=Config)


class Diverged(Exception):
    """The weights after step `bad`, and what came of them, are not to be used."""

    def __init__(self, step: int, bad: int, what: str):
        super().__init__(f"step {step}: {what}")
        self.step, self.bad, self.what = step, bad, what


class Skips:
    """Steps in a row in which no optimizer step was taken."""

    def __init__(self, patience: int):
        self.patience, self.in_row = patience, 0

    def count(self, step: int, stats: Mapping[str, float]) -> None:
        """Raises Diverged once there are too many. `stats`: of the step, with the share of its optimizer steps that were skipped."""
        skipped = max(stats["skipped"], stats.get("value_skipped", 0.0))
        self.in_row = self.in_row + 1 if skipped == 1 else 0
        if self.in_row >= self.patience:
            what = f"the gradients of {self.in_row} steps in a row were not finite, or above divergence.grad_norm (divergence.patience)"
            raise Diverged(step, step - self.in_row, what)


def require_finite(logprobs: Iterable[float], step: int, bad: int) -> None:
    """Raises Diverged where a log-probability is none. `bad`: the step after which the model had these weights."""
    if not math.isfinite(sum(logprobs)):
        raise Diverged(step, bad, RUINED)


def slowed(config: C, folder: Path) -> C:
    """The settings with the learning rate that going back has left."""
    factor = min((row["factor"] for row in _rows(folder, config)), default=1.0)
    sections = {name: optim for name in ("optim", "critic") if (optim := getattr(config, name, None))}
    return config.model_copy(update={name: optim.model_copy(update={"lr": optim.lr * factor}) for name, optim in sections.items()})


def go_back(config: Config, folder: Path, diverged: Diverged) -> None:
    """Remove what a ruined model left, and note the lower learning rate. Raises RunError after divergence.rollbacks of them."""
    settings, before = config.divergence, _rows(folder, config)
    checkpoints = Checkpoints(folder / "checkpoints")
    to = max((found.step for found in checkpoints.complete() if found.step < diverged.bad), default=0)
    allowed, factor = len(before) < settings.rollbacks, settings.lr_factor ** (len(before) + 1)
    if allowed:
        row = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "step": diverged.step, "why": diverged.what, "to": to}
        _append(folder / ROLLBACKS, row | {"lr": config.optim.lr, "factor": factor})
    checkpoints.remove_from(max(diverged.bad, 1))
    for model in (folder / "models").glob("step_*"):
        if int(model.name.removeprefix("step_")) >= diverged.bad:
            shutil.rmtree(model)
    if not allowed:
        start = f"goes on from step {to}, the newest good checkpoint" if to else "starts anew: no checkpoint is good"
        raise RunError(
            f"{diverged}; gone back {len(before)} times already (divergence.rollbacks). The same command with a lower optim.lr and "
            f"run.allow=[optim.lr] {start}"
        )
    print(f"{diverged}; back to step {to} with optim.lr={config.optim.lr * factor:g} (divergence.lr_factor)", flush=True)


def rows(folder: Path) -> list[dict[str, Any]]:
    """Every time that the run went back: time, step, why, to, lr as it is set, and the factor on it from then on."""
    file = folder / ROLLBACKS
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _rows(folder: Path, config: Config) -> list[dict[str, Any]]:
    """Those with this learning rate: another is a person's answer to them."""
    return [row for row in rows(folder) if row["lr"] == config.optim.lr]


def _append(file: Path, row: dict[str, Any]) -> None:
    with file.open("a") as out:
        out.write(json.dumps(row) + "\n")
        out.flush()
        os.fsync(out.fileno())
