"""One lab for all tests of this folder: starting it takes half a minute."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lab.dstack.lab import Lab, lacking

SFT = "python -m trainer.train_sft --config trainer/recipes/demo-sft.yaml trainer.steps=20 trainer.checkpoint_every=20"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if reason := lacking():
        for item in items:
            if "integration/dstack" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason=f"dstack on hosts: {reason}"))


@pytest.fixture(scope="package")
def lab() -> Iterator[Lab]:
    """Two hosts in an idle fleet `lab`, whose files are rendered."""
    with Lab(hosts=2) as lab:
        lab.stack()
        lab.fleet()
        yield lab


@pytest.fixture
def tidy(lab: Lab) -> Iterator[None]:
    """Leaves the lab as it was made: every host on, and nothing running."""
    yield
    lab.tidy()


@pytest.fixture(scope="package")
def model(lab: Lab) -> None:
    """A warm-started model on the volume that the hosts share, for the demo recipe."""
    lab.must(f"FLOTILLA_RUNS={lab.shared} {SFT}")
