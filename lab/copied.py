"""A copy of the project: tests and benchmarks change its stacks, and render into it. `.gitignore` too, as dstack uploads what it leaves."""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).parents[1]
PARTS = (
    ".gitignore",
    "Pulumi.yaml",
    "cli",
    "infra",
    "stacks",
    "fleets",
    "cluster_tasks",
    "trainer",
    "retrieval",
    "serving",
    "sweeps",
    "requirements",
)


def copy_project(folder: Path) -> Path:
    """All that a person's commands need of the project, into `folder`, which may be there."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, folder / part, ignore=shutil.ignore_patterns("__pycache__", ".venv"))
        else:
            shutil.copy(source, folder / part)
    return folder
