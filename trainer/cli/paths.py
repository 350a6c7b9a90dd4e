"""Where settings lead: a run's name and folder, the folders of models, what `run:NAME` and `~` stand for."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from trainer.cli.changes import HARMLESS, ROUNDING, flatten
from trainer.configs.sections import Config, ModelConfig

C = TypeVar("C", bound=Config)
S = TypeVar("S", bound=BaseModel)
MODEL_FILES = {"config.json": ("config.json",), "weights": ("*.safetensors", "*.bin")}
HUB_NAME = re.compile(r"(?!.*(--|\.\.))([A-Za-z0-9_][\w.-]*/)?[A-Za-z0-9_][\w.-]{0,95}(?<![.-])", re.ASCII)
TOKENIZER_FILES = {"tokenizer": ("tokenizer*", "vocab*", "*.model", "*.tiktoken")}


def runs_root() -> Path:
    """Where runs are written: $FLOTILLA_RUNS, or ./runs."""
    return Path(os.environ.get("FLOTILLA_RUNS") or "runs")


def read_roots() -> list[Path]:
    """Where a run is looked for by its name: $FLOTILLA_RUNS alone, or ./runs and those of the clusters of this machine."""
    return [runs_root()] if os.environ.get("FLOTILLA_RUNS") else _roots_here()


def _roots_here() -> list[Path]:
    return [Path("runs"), *sorted(Path("build").glob("*/runs"))]  # cluster_tasks/local/plan.py makes the latter


def runs_named(name: str, *more: Path) -> list[Path]:
    """The folders of all runs of that name, each once; `more` are looked at too."""
    found = {folder.resolve(): folder for folder in (*(root / name for root in read_roots()), *more) if is_run(folder)}
    return list(found.values())


def not_clear(folders: list[Path]) -> str:
    """Why none of several is taken."""
    return f"{' and '.join(map(str, folders))} are runs of that name; give the folder of one, or $FLOTILLA_RUNS"


def is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("run.yaml", "metrics.jsonl", "model"))


def elsewhere(name: str) -> str:
    """Where a run lies that was not found, for an error's end."""
    found = [folder for root in _roots_here() if is_run(folder := root / name)]
    return f"; there is {found[0]}: give that folder" if found else ""


def run_folder(config: Config, recipe: Path | None = None) -> Path:
    """<root>/<run.name>; without a name it is derived from the recipe's stem and all settings."""
    return runs_root() / (config.run.name or derived_name(config, recipe.stem if recipe else "run"))


def derived_name(config: Config, stem: str) -> str:
    """The same settings give the same name, so that the same submit resumes; other settings are another run.

    More steps are the same run, which resumes, unless the learning rate of every step depends on their number; so are less memory and
    other settings that a run may be resumed with.
    """
    harmless = (*HARMLESS, *ROUNDING, "run.name", *(["trainer.steps"] if config.optim.schedule == "constant" else []))
    flat = {key: value for key, value in flatten(config).items() if not key.startswith(harmless)}
    return f"{stem}-{hashlib.sha256(json.dumps(flat, sort_keys=True).encode()).hexdigest()[:8]}"


def resolved_paths(config: C) -> C:
    """run:NAME replaced by the folder of that run's exported model, ~ by the home folder."""
    model = {key: _resolved(value) for key in ("path", "tokenizer") if (value := getattr(config.model, key)) is not None}
    sections: dict[str, Any] = {
        "model": config.model.model_copy(update=model),
        "data": config.data.model_copy(update={"path": os.path.expanduser(config.data.path)}),  # noqa: PTH111
    }
    found = config.model_copy(update=sections)
    for other in config.other_models():
        found = _replaced(found, other.setting.split("."), _resolved(other.model.path or ""))
    return found


def _replaced(section: S, keys: Sequence[str], value: Any) -> S:
    """The section with another value of the setting that `keys` lead to."""
    first, *rest = keys
    return section.model_copy(update={first: _replaced(getattr(section, first), rest, value) if rest else value})


def _resolved(value: str) -> str:
    if value.startswith("characters:"):
        return value
    if not value.startswith("run:"):
        return os.path.expanduser(value)  # noqa: PTH111
    name = value.removeprefix("run:")
    return str((runs_named(name) or [runs_root() / name])[0] / "model")


def several_runs(config: Config) -> list[str]:
    """Models that are named by run:NAME where several runs have the name."""
    written = {f"model.{key}": getattr(config.model, key) for key in ("path", "tokenizer")}
    written |= {other.setting: other.model.path for other in config.other_models()}
    named = {key: runs_named(value.removeprefix("run:")) for key, value in written.items() if value and value.startswith("run:")}
    return [f"{key}={written[key]}: {not_clear(folders)}" for key, folders in named.items() if len(folders) > 1]


def check_model(config: ModelConfig) -> list[str]:
    """Errors in model.path and model.tokenizer as they were written: one line each. What is a hub's is left to the hub."""
    errors: list[str] = []
    of_path = MODEL_FILES if config.tokenizer else {**MODEL_FILES, **TOKENIZER_FILES}
    for key, wanted in (("path", of_path), ("tokenizer", TOKENIZER_FILES)):
        value = getattr(config, key)
        if value is None or value.startswith("characters:"):
            continue
        folder = Path(_resolved(value))
        if value.startswith("run:") and not (folder / "config.json").is_file():
            errors.append(f"model.{key}={value}: that run has exported no model to {folder}{_near_runs(value)}")
        elif not (folder.is_dir() or is_hub_name(value)):
            errors.append(f"model.{key}={value}: no such folder; a hub name has the form organization/name")
        elif folder.is_dir():
            missing = [name for name, patterns in wanted.items() if not any(any(folder.glob(pattern)) for pattern in patterns)]
            if missing:
                fix = "set model.tokenizer" if missing == ["tokenizer"] and key == "path" else "give one that save_pretrained() wrote"
                errors.append(f"model.{key}={value}: the folder has no {' and no '.join(missing)}; {fix}")
    return errors


def is_hub_name(path: str) -> bool:
    """Whether this is no folder here, and has the form of a hub name: `name` or `organization/name`."""
    return HUB_NAME.fullmatch(path) is not None and not Path(path).is_dir()


def _near_runs(name: str) -> str:
    name = name.removeprefix("run:")
    if there := elsewhere(name):
        return there
    runs = [folder.parent.name for root in read_roots() for folder in root.glob("*/model")]
    near = difflib.get_close_matches(name, runs, n=3, cutoff=0.0)
    return f"; runs that have: {', '.join(near)}" if near else f"; let it train to its end first; no run in {runs_root()} has one"
