"""What trials are compared by: a metric of their metrics.jsonl."""

from __future__ import annotations

import math
import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trainer import metrics
from trainer.configs.sections import Config
from trainer.errors import ConfigError

FORM = "KEY[:max|min][:last|best|meanK], such as eval_reward:max or loss:min:mean10"


@dataclass(frozen=True)
class Metric:
    key: str
    goal: Literal["max", "min"]
    over: str = "last"  # last, best, or meanK: of the last K values

    def __str__(self) -> str:
        return f"{self.key}:{self.goal}:{self.over}"

    @property
    def worst(self) -> float:
        return -math.inf if self.goal == "max" else math.inf

    def order(self, value: float) -> float:
        """To sort by, the best first; what is no number is last."""
        return math.inf if math.isnan(value) else -value if self.goal == "max" else value


def parse(text: str) -> Metric:
    """Raises ConfigError."""
    key, *rest = text.split(":")
    goal: Literal["max", "min"] = "min" if "loss" in key else "max"
    over = "last"
    for word in rest:
        if word in ("max", "min"):
            goal = "max" if word == "max" else "min"
        elif word in ("last", "best") or re.fullmatch(r"mean[1-9]\d*", word):
            over = word
        else:
            raise ConfigError(f"--metric {text}: {word!r} is neither max, min, last, best nor meanK; the form is {FORM}")
    if not key:
        raise ConfigError(f"--metric {text!r}: names no metric; the form is {FORM}")
    return Metric(key, goal, over)


def default(config: Config) -> Metric:
    """What a run says of itself on rows that are held out; else of its last steps."""
    online = hasattr(config, "reward")
    held_out = bool(getattr(config.trainer, "eval_prompts", 0) or getattr(config, "evals", {}))
    if held_out:
        return Metric("eval_reward", "max") if online else Metric("eval_loss", "min")
    return Metric("reward", "max", "mean10") if online else Metric("loss", "min", "mean10")


def require_known(metric: Metric, config: Config) -> None:
    """Raises ConfigError for an evaluation that the run does not make. Other metrics are looked for once a trial has a step."""
    if not metric.key.startswith("eval_"):
        return
    evals = getattr(config, "evals", {})
    if not getattr(config.trainer, "eval_prompts", 0) and not evals:
        raise ConfigError(f"--metric {metric.key}: the run evaluates nothing; set trainer.eval_prompts, or choose a metric of each step")
    key, slash, name = metric.key.partition("/")
    if slash and name.partition("/")[0] not in evals:
        known = f"evals has {', '.join(evals)}" if evals else "the run has no evals"
        raise ConfigError(f"--metric {metric.key}: {name} is no set of evals; {known}, and {key} is of the rows held out")


def value_at(folder: Path, step: int, metric: Metric) -> float | None:
    """Of the steps 1 to `step`; None where no row has it, NaN where the last one is not finite."""
    found = [row[metric.key] for row in metrics.read(folder) if 1 <= row["step"] <= step and metric.key in row]
    if not found:
        return None
    if metric.over == "best":
        finite = [value for value in found if value is not None]
        return (max if metric.goal == "max" else min)(finite) if finite else math.nan
    last = found[-int(metric.over.removeprefix("mean")) :] if metric.over.startswith("mean") else found[-1:]
    return math.nan if None in last else statistics.fmean(last)


def keys(folder: Path) -> list[str]:
    """The metrics that a run has in any step after 0."""
    return list(dict.fromkeys(key for row in metrics.read(folder) if row["step"] for key in row if key != "step"))
