"""One dstack server for the tests of this folder; each has projects of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from support.dstack_place import Place
from support.dstack_server import Running, running


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


@pytest.fixture
def place(dstack: Running, request: pytest.FixtureRequest) -> Place:
    return Place(dstack, f"r-{abs(hash(request.node.name)) % 10**8}")


@pytest.fixture(scope="package")
def aws(dstack: Running) -> Place:
    """A project with a backend, which tests leave as it is; each has fleets of its own names."""
    return Place(dstack, "resources-aws").on_aws()
