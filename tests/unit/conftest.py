"""Shared by tests of settings and of runs."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where runs lie."""
    monkeypatch.setenv("FLOTILLA_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"
