"""What a model's folder says of where it comes from: README.md with settings and figures, and the run's curve.

https://huggingface.co/docs/hub/model-cards
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from trainer import metrics
from trainer.cli import yaml_io
from trainer.errors import ConfigError
from trainer.metrics.cost import KEY

FIGURES = ("reward", "eval_reward", "loss", "kl", "response_tokens", KEY)
CURVE = "plot.png"


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
    return {"README.md": card(run.resolve().name, settings, step, rows, CURVE in found).encode(), **found}


def card(name: str, settings: dict[str, Any], step: int, rows: list[dict[str, Any]], curve: bool = False) -> str:
    """The model card. `rows` are those of metrics.jsonl up to `step`."""
    model, algorithm = settings.get("model") or {}, settings.get("algorithm") or {}
    base = model.get("path")
    head = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["flotilla", algorithm.get("name") or "sft"]}
    if base and not Path(base).is_absolute():  # a hub's name; a folder of a machine says nothing elsewhere
        head["base_model"] = base
    last = {key: value for row in rows for key, value in row.items() if key.startswith("eval_") and value is not None}
    last = {key: row[key] for row in rows for key in FIGURES if row.get(key) is not None} | last
    table = ["| | at this step |", "|---|---|", *(f"| {key.replace('_', ' ')} | {value:.4g} |" for key, value in last.items())]
    lines = [
        f"---\n{yaml_io.dump(head)}---",
        f"# {name}, step {step}",
        f"Trained from {base or 'random weights'} by {algorithm.get('name') or 'supervised fine-tuning'}.",
        *(["\n".join(table)] if last else []),
        *([f"![curve]({CURVE})"] if curve else []),
        f"## Settings\n\n```yaml\n{yaml_io.dump(settings)}```",
    ]
    return "\n\n".join(lines) + "\n"
