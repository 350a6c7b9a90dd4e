"""Checkpoints of a run that exists in a test only."""

from __future__ import annotations

import json
from pathlib import Path

from trainer.checkpoints.folders import Checkpoint, Checkpoints


def write(checkpoints: Checkpoints, step: int, **kwargs) -> None:
    with checkpoints.writing(step, {"model": "abc", "world_size": 2, "loader": {"position": step}}, **kwargs) as folder:
        (folder / "engine").mkdir()
        (folder / "engine" / "rank_0.pt").write_bytes(bytes([step % 256]) * 100_000)
        (folder / "rng.json").write_text(json.dumps([step]))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def newest(checkpoints: Checkpoints) -> Checkpoint:
    found = checkpoints.latest()
    assert found is not None
    return found
