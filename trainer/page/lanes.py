"""Where the time of a traced step went."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def steps(folder: Path) -> list[int]:
    return []


def lanes(folder: Path, step: int) -> dict[str, Any]:
    raise NotImplementedError


def causes(row: dict[str, Any]) -> list[str]:
    return []
