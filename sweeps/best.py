"""The best trial, in words and as a settings file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sweeps.decisions import Trial
from sweeps.objective import Metric
from trainer.cli import yaml_io

FILE = "best.yaml"
OF_TRIAL = ("name", "allow", "pause_at")  # what `run` says of the trial alone


def best(trials: Sequence[Trial], metric: Metric) -> Trial | None:
    """Of those that are furthest, the one with the best value there."""
    judged = [trial for trial in trials if trial.values and trial.state != "failed"]
    furthest = max((trial.reached for trial in judged), default=0)
    there = [trial for trial in judged if trial.reached == furthest]
    return min(there, key=lambda trial: metric.order(trial.values[furthest]), default=None)


def write(run: Path, file: Path) -> None:
    """The settings of a run, for --config, without what makes it that trial."""
    settings = yaml_io.load((run / "run.yaml").read_text())
    settings["run"] = {key: value for key, value in settings.get("run", {}).items() if key not in OF_TRIAL}
    draft = file.with_name(f".{file.name}")
    draft.write_text(yaml_io.dump(settings))
    draft.replace(file)
