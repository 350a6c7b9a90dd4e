"""One dstack server for the tests of this folder; each has projects of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from dstack_server import Running, running


@pytest.fixture(scope="package")
def dstack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("dstack")) as server:
        yield server


@pytest.fixture(autouse=True)
def its_home(dstack: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys that the example stacks name, and no settings of whoever runs the tests."""
    for name, value in dstack.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "tracebacklimit", 1000, raising=False)  # a resource that fails turns it off for the engine; given back
    for name in ("DSTACK_TOKEN", "DSTACK_PROJECT", "DSTACK_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
