"""Shared by tests of settings and of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
MADE: dict[str, Path] = {}  # models, by family


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where runs lie."""
    monkeypatch.setenv("FLOTILLA_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's buckets hold a million numbers, and not 2 GB each, however small the model.

    They outlive their engines: after a dozen, this process would be too large for the system to fork it.
    """
    from trainer.ranks import engine  # only tests that want it wait for torch

    configuration = engine.configuration

    def small(*args: Any) -> dict[str, Any]:
        found = configuration(*args)
        return found | {"zero_optimization": found["zero_optimization"] | {"reduce_bucket_size": 10**6}}

    monkeypatch.setattr(engine, "configuration", small)


@pytest.fixture
def sighted_folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of the family `kind`, which sees; one for all tests of this process, which only read it."""
    from support.sighted import sighted

    if kind not in MADE:
        MADE[kind] = sighted(kind, tmp_path_factory.mktemp(kind))
    return MADE[kind]


@pytest.fixture
def project(tmp_path: Path):
    """A project in a temporary folder; write(settings) makes its one stack file."""
    (tmp_path / "Pulumi.yaml").write_text((ROOT / "Pulumi.yaml").read_text())
    (tmp_path / "stacks").mkdir()

    def write(settings: Any) -> Path:
        (tmp_path / "stacks/Pulumi.test.yaml").write_text(yaml.safe_dump({"config": settings}))
        return tmp_path

    return write
