"""One lab for all tests of this folder: starting it takes half a minute."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from integration.dstack.lab import Lab, lacking


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if reason := lacking():
        for item in items:
            if "integration/dstack" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason=f"dstack on hosts {reason}"))


@pytest.fixture(scope="package")
def lab() -> Iterator[Lab]:
    """Two hosts in an idle fleet `lab`, whose files are rendered."""
    with Lab(hosts=2) as lab:
        lab.stack()
        lab.fleet()
        yield lab
