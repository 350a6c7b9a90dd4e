"""What a model's folder says of where it comes from: README.md with data, settings, figures and commit, and the run's curve.

https://huggingface.co/docs/hub/model-cards
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer import metrics
from trainer.cli import yaml_io
from trainer.errors import ConfigError
from trainer.metrics.cost import KEY

FIGURES = ("reward", "eval_reward", "loss", "kl", "response_tokens", KEY)
CURVE = "plot.png"
STARTS, SUITES = "starts.jsonl", "suites.jsonl"  # of a run's folder: trainer/runs, and what benchmark suites found (serving/suites.py)


def files(run: Path, settings: dict[str, Any], step: int) -> dict[str, bytes]:
    """By name, what lies beside the weights of `step`; without a curve where log.plot is false or matplotlib is not installed."""
    try:
        rows = [row for row in metrics.read(run) if row["step"] <= step]
    except ConfigError:
        rows = []  # a run that has logged nothing
    found = {}
    if (settings.get("log") or {}).get("plot", True) and any(row["step"] for row in rows):
        try:
            figure, drawn = metrics.new_figure(), io.BytesIO()
            metrics.draw(figure, rows, run.resolve().name)
            figure.savefig(drawn)
            found[CURVE] = drawn.getvalue()
        except ConfigError:
            pass
    starts, suites = (rows_of(run / name) for name in (STARTS, SUITES))
    text = card(run.resolve().name, settings, step, rows, CURVE in found, starts[-1] if starts else {}, suites)
    return {"README.md": text.encode(), **found}


def rows_of(file: Path) -> list[dict[str, Any]]:
    """Of a file of the run that it may not have."""
    return metrics.rows_of(file) if file.exists() else []


def card(
    name: str,
    settings: dict[str, Any],
    step: int,
    rows: list[dict[str, Any]],
    curve: bool = False,
    start: Mapping[str, Any] | None = None,
    suites: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The model card. `rows` are those of metrics.jsonl up to `step`, `start` the last of starts.jsonl, `suites` those of suites.jsonl."""
    model, algorithm = settings.get("model") or {}, settings.get("algorithm") or {}
    base = model.get("path")
    head = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["flotilla", algorithm.get("name") or "sft"]}
    if base and not Path(base).is_absolute():  # a hub's name; a folder of a machine says nothing elsewhere
        head["base_model"] = base
    last = {key: value for row in rows for key, value in row.items() if key.startswith("eval_") and value is not None}
    last = {key: row[key] for row in rows for key in FIGURES if row.get(key) is not None} | last
    table = ["| | at this step |", "|---|---|", *(f"| {key.replace('_', ' ')} | {value:.4g} |" for key, value in last.items())]
    parts = [
        f"---\n{yaml_io.dump(head)}---",
        f"# {name}, step {step}",
        f"Trained from {base or 'random weights'} by {algorithm.get('name') or 'supervised fine-tuning'}.",
        *origin(settings, start or {}),
        *(["\n".join(table)] if last else []),
        *([f"![curve]({CURVE})"] if curve else []),
        *([measured(suites, step)] if any(row.get("step") == step for row in suites) else []),
        f"## Settings\n\n```yaml\n{yaml_io.dump(settings)}```",
    ]
    return "\n\n".join(parts) + "\n"


def origin(settings: dict[str, Any], start: Mapping[str, Any]) -> list[str]:
    """Data, commit and versions, as far as they are known."""
    data, packages = (settings.get("data") or {}).get("path"), start.get("packages") or {}
    changed = start.get("changed_files")
    known = {
        "Data": f"`{data}`" if data else "",
        "Commit": f"`{start['commit']}`{f', {changed} files changed' if changed else ''}" if start.get("commit") else "",
        "Packages": ", ".join(f"{package} {version}" for package, version in packages.items()),
    }
    found = [f"- {name}: {value}" for name, value in known.items() if value]
    return ["\n".join(found)] if found else []


def measured(suites: Sequence[Mapping[str, Any]], step: int) -> str:
    """The newest result of each metric at this step."""
    newest = {(row["suite"], row["task"], row["metric"]): row for row in suites if row.get("step") == step}
    lines = []
    for (_, task, metric), row in newest.items():
        error = "" if row.get("stderr") is None else f" ± {row['stderr']:.2g}"
        lines.append(f"| {task} | {metric} | {row['value']:.4g}{error} | {row['package']} {row['version']} |")
    return "\n".join(["## Benchmarks", "", "| Task | Metric | Value | By |", "|---|---|---|---|", *lines])
