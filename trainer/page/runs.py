"""Runs below a folder: which there are, what state each is in, what it was set to and what happened to it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from . import metrics, record

ALIVE = "alive.json"  # written by trainer/runs/alive.py while the run's process lives
SILENT = 30.0  # seconds without a sign of life after which a run counts as killed
EVENTS = {"starts.jsonl": "start", "rollbacks.jsonl": "rollback", "faults.jsonl": "fault", "rows.jsonl": "data"}
MARKS = ("run.yaml", metrics.FILE, "model")  # by any of which a folder is a run's
NAME = re.compile(r"[^/\x00]{1,255}")
MOST_EVENTS = 2000


class NoRun(Exception):
    """There is no such run; its text is for people."""


def is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in MARKS)


def found(roots: list[Path]) -> dict[str, Path]:
    """Folders of runs by name; the first of a name, over all roots. A root may be a run itself."""
    runs: dict[str, Path] = {}
    for root in roots:
        below = [root] if is_run(root) else sorted(folder for folder in children(root) if is_run(folder))
        for folder in below:
            runs.setdefault(folder.resolve().name, folder)
    return runs


def children(root: Path) -> list[Path]:
    try:
        return [path for path in root.iterdir() if not path.name.startswith(".") and path.is_dir()]
    except OSError:
        return []


def folder_of(roots: list[Path], name: str) -> Path:
    """Raises NoRun. A name leads nowhere but to a folder right below a root."""
    if NAME.fullmatch(name) and name not in (".", ".."):
        for root in roots:
            for folder in (root, root / name):
                if folder.resolve().name == name and (folder == root or folder.resolve().parent == root.resolve()) and is_run(folder):
                    return folder
    near = ", ".join(sorted(found(roots))[:5])
    raise NoRun(f"no run {name!r} in {', '.join(map(str, roots))}; {f'there are: {near}' if near else 'there is none'}")


def summary(folder: Path, now: float | None = None) -> dict[str, Any]:
    """A row of the table of runs. Reads little, whatever the run's length."""
    now = time.time() if now is None else now
    settings, last = read_settings(folder), metrics.tail(folder)
    flat = dotted(settings)
    starts, happened = lines(folder / "starts.jsonl"), lines(folder / "faults.jsonl")
    begun = starts[0].get("time") if starts else None
    steps = flat.get("trainer.steps")
    state, why = state_of(folder, last.get("step", 0), steps, starts, happened, now)
    return {
        "name": folder.resolve().name,
        "state": state,
        "word": why,
        "step": last.get("step", 0),
        "steps": steps,
        **{key: last.get(key) for key in ("reward", "eval_reward", "loss", "seconds", "tokens_per_second", "cost_usd")},
        "owner": next((start["owner"] for start in reversed(starts) if start.get("owner")), None),
        "algorithm": flat.get("algorithm.name"),
        "model": flat.get("model.path") or ("random weights" if "model.init" in str(flat) else None),
        "started": begun,
        "starts": len(starts),
        "data": next((row.get("what") for row in reversed(lines(folder / "rows.jsonl"))), None),
        "updated": modified(folder / metrics.FILE),
        "episodes": (folder / record.FILE).exists(),
    }


def state_of(
    folder: Path, step: int, steps: Any, starts: list[dict[str, Any]], happened: list[dict[str, Any]], now: float
) -> tuple[str, str]:
    """running, finished, stopped, failed or killed; and the last word on it."""
    alive = read_json(folder / ALIVE)
    last = happened[-1] if happened else {}
    word = str(last.get("what", ""))
    if alive is None:
        done = (folder / "model").exists()
        return ("finished" if done else "unknown"), word
    begun = starts[-1].get("time", "") if starts else ""
    if not alive.get("ended"):
        ago = now - alive.get("time", 0)
        host, step_now = alive.get("host", "?"), alive.get("doing") or ""
        return ("running", step_now or word) if ago < SILENT else ("killed", f"no sign of life for {words_of(ago)}, last on {host}")
    if last.get("step", 0) is None and str(last.get("time", "")) >= begun:
        return "failed", word
    if isinstance(steps, int) and step >= steps:
        return "finished", word
    return "stopped", word or "it was asked to stop and has saved; the same command resumes"


def events(folder: Path) -> list[dict[str, Any]]:
    """Starts, rollbacks, faults, evaluations' steps are not in it; in the order of their times. `step` where it is known."""
    rows = [
        {"time": row.get("time"), "kind": kind, "step": row.get("step"), "text": said(kind, row)}
        for name, kind in EVENTS.items()
        for row in lines(folder / name)
    ]
    return sorted(rows, key=lambda row: str(row["time"] or ""))[-MOST_EVENTS:]


def said(kind: str, row: dict[str, Any]) -> str:
    if kind == "start":
        commit = f", commit {row['commit'][:10]}" if row.get("commit") else ""
        dirty = f" with {row['changed_files']} changed files" if row.get("changed_files") else ""
        changed = "".join(f"; {key}: {was!r} to {now!r}" for key, (was, now) in (row.get("changed") or {}).items())
        after = f" after step {row['step']}" if row.get("step") else ""
        return f"started on {row.get('host')}{after}{commit}{dirty}{changed}"
    if kind == "rollback":
        rest = ", ".join(f"{key} {value}" for key, value in row.items() if key not in ("time", "step"))
        return f"went back: {rest}"
    return str(row.get("what", row))


def read_settings(folder: Path) -> dict[str, Any]:
    """Nothing where they cannot be read."""
    try:
        found = yaml.load((folder / "run.yaml").read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def dotted(settings: dict[str, Any], before: str = "") -> dict[str, Any]:
    """Settings by their dotted names."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= dotted(value, f"{before}{key}.") if isinstance(value, dict) and value else {f"{before}{key}": value}
    return flat


def differences(of: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Settings in which runs differ: name, and the value of each as JSON, None where a run has none."""
    flats = [dotted(settings) for settings in of]
    names = sorted({name for flat in flats for name in flat} - {"run.name"})
    rows = [{"name": name, "values": [json.dumps(flat[name], default=str) if name in flat else None for flat in flats]} for name in names]
    return [row for row in rows if len(set(row["values"])) > 1]


def before(roots: list[Path], name: str) -> str | None:
    """The run that began last before this one, of the same entry point's settings as far as that shows: for what changed since."""
    begins = {other: begin for other, folder in found(roots).items() if (begin := first_start(folder)) is not None}
    own = begins.pop(name, None)
    earlier = {other: begin for other, begin in begins.items() if own is not None and begin < own}
    return max(earlier, key=lambda other: earlier[other]) if earlier else None


def first_start(folder: Path) -> float | None:
    for row in lines(folder / "starts.jsonl")[:1]:
        try:
            return time.mktime(time.strptime(str(row.get("time"))[:19], "%Y-%m-%dT%H:%M:%S"))
        except ValueError:
            return None
    return None


def lines(file: Path) -> list[dict[str, Any]]:
    """Objects of a file with one per line; what is damaged or not finished is left out."""
    return [*_objects(file)]


def _objects(file: Path) -> Iterator[dict[str, Any]]:
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for line in text.split("\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row


def read_json(file: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def modified(file: Path) -> float | None:
    try:
        return file.stat().st_mtime
    except OSError:
        return None


def words_of(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
