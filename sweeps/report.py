"""A sweep as one HTML file that opens offline: the page of runs' own styles and charts, and a view of all trials."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sweeps.best import best
from sweeps.budget import Budget
from sweeps.decisions import Trial
from sweeps.plan import Plan
from sweeps.space import Choice, Parameter
from trainer.page.bundle import ASSETS, STYLES, filled
from trainer.page.metrics import Metrics, number

FILE = "report.html"
SCRIPTS = (
    ASSETS / "uplot.js",
    ASSETS / "base.js",
    ASSETS / "charts.js",
    Path(__file__).with_name("assets") / "sweep.js",
    ASSETS / "start.js",
)
OTHERS = ("reward", "loss", "kl")  # curves beside the metric's own, where runs have them
WORDS = {"open": "waits", "done": "finished", "pruned": "stopped early", "failed": "failed"}


def write(plan: Plan, trials: Sequence[Trial], runs: Path, budget: Budget, file: Path) -> None:
    """At any time, also while trials run."""
    draft = file.with_name(f".{file.name}")
    draft.write_text(page(told(plan, trials, runs, budget)), encoding="utf-8")
    draft.replace(file)


def told(plan: Plan, trials: Sequence[Trial], runs: Path, budget: Budget) -> dict[str, Any]:
    """What the page shows: trials in order, the best of those that came furthest first."""
    ranked = sorted(trials, key=lambda trial: _order(plan, trial))
    first, seconds = best(trials, plan.metric), sum(trial.seconds for trial in trials)
    metrics = {trial.number: Metrics(runs / plan.run(trial.number)).read() for trial in trials}
    keys = [plan.metric.key, *(key for key in OTHERS if key != plan.metric.key)]
    shown = [key for key in keys if any(key in known.columns for known in metrics.values())]
    steps = {number: max(known.steps, default=0) for number, known in metrics.items()}
    return {
        "name": plan.name,
        "metric": plan.metric.key,
        "search": plan.search,
        "stop": plan.stop,
        "rungs": plan.rungs,
        "wanted": plan.trials,
        "axes": [axis(each) for each in plan.space],
        "curves": shown,
        "seconds": seconds,
        "cost": budget.cost(seconds),
        "steps": sum(steps.values()),
        "trials": [
            {
                "name": plan.run(trial.number),
                "number": trial.number,
                "point": trial.point,
                "state": trial.state,
                "word": WORDS[trial.state],
                "best": trial is first,
                "place": place,
                "share": 1 - place / max(1, len(ranked) - 1),
                "value": number(trial.values[trial.reached]) if trial.values else None,
                "step": steps[trial.number],
                "seconds": trial.seconds,
                "cost": budget.cost(trial.seconds),
                "error": trial.error,
                "curves": {key: metrics[trial.number].curve(key, begin=1) for key in shown},
            }
            for place, trial in enumerate(ranked)
        ],
    }


def _order(plan: Plan, trial: Trial) -> tuple[bool, int, float]:
    value = trial.values.get(trial.reached)
    return trial.state == "failed", -trial.reached, plan.metric.order(value) if value is not None else 0.0


def axis(parameter: Parameter) -> dict[str, Any]:
    """Of the parallel coordinates: named places, or a scale between two ends."""
    if isinstance(parameter, Choice):
        return {"key": parameter.key, "ticks": parameter.texts, "log": False}
    return {"key": parameter.key, "ticks": None, "ends": [parameter.low, parameter.high], "log": parameter.log}


def page(sweep: dict[str, Any]) -> str:
    """No script but ours runs in it: the policy names each by its digest, as trainer/page/bundle.py does."""
    data = json.dumps({"answers": {}, "names": [], "sweep": sweep}).replace("<", "\\u003c")
    scripts = [f"window.FLOTILLA = {data};", *(file.read_text(encoding="utf-8") for file in SCRIPTS)]
    digests = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in scripts)
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {digests}"
    head = [f'<meta http-equiv="Content-Security-Policy" content="{policy}">']
    head += [f"<style>{(ASSETS / name).read_text(encoding='utf-8')}</style>" for name in STYLES]
    return filled(f"Sweep {sweep['name']}", "\n".join(head), "\n".join(f"<script>{text}</script>" for text in scripts))
