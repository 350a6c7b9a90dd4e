"""How far a run is, for `flotilla status` and `top`: a file among Ray's logs, which the cluster's dashboard shows to who knows the job.

    {"run": "demo", "step": 12, "steps": 100, "checkpoint": "/runs/demo/checkpoints/step_10", "reward": 0.5, "seconds": 0.8}

Numbers are those of the last step, by their names in metrics.jsonl; what is not known is left out.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # Ray sets it for what it was given as a job
NUMBERS = ("reward", "loss", "tokens_per_second", "seconds")


class Progress:
    """A sink of metrics. `done`: steps in the checkpoint that is resumed; `file`: None where this is no job of Ray."""

    def __init__(self, folder: Path, done: int, total: int, file: Path | None) -> None:
        self.file, self.folder, self.total = file, folder, total
        self.show(done, {})

    def show(self, step: int, numbers: Mapping[str, float]) -> None:
        """The checkpoint of this very step is shown with the next one: it is written meanwhile."""
        if self.file is None or (numbers and not numbers.keys() & {*NUMBERS}):  # an evaluation alone
            return
        saved = [path for path in (self.folder / "checkpoints").glob("step_*") if path.name.removeprefix("step_").isdecimal()]
        last = {"checkpoint": str(max(saved, key=lambda path: int(path.name[5:])))} if saved else {}
        known = {name: numbers[name] for name in NUMBERS if math.isfinite(numbers.get(name, math.nan))}
        write(self.file, {"run": self.folder.name, "step": step, "steps": self.total} | last | known)

    def close(self) -> None:
        """The file stays: only of jobs that run it is read."""


def among_logs(kind: str) -> Path | None:
    """The file of this kind, `KIND-JOB.json`; None where this is no job of Ray, or not connected to its cluster."""
    job = json.loads(os.environ.get(JOB) or "{}").get("metadata", {}).get("job_submission_id")
    if not job:
        return None
    import ray  # late: a run under torchrun may have no Ray

    if not ray.is_initialized():
        return None
    return Path(ray._private.worker._global_node.get_logs_dir_path()) / f"{kind}-{job}.json"  # type: ignore[attr-defined]


def write(file: Path, value: Any) -> None:
    """Readers see the file as it was or as it is. A full disk must not end the run."""
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    with suppress(OSError):
        beside.write_text(json.dumps(value))
        beside.replace(file)
