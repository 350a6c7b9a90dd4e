"""A pool of sandboxes for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.sandbox_pools import TOKEN, Started


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    made = Started()
    try:
        yield made
    finally:
        made.close()
