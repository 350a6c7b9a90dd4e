"""Which dstack server a stack's commands ask, and what a person reads where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster_tasks.client.dstack_server import ConnectionFailed, connect
from stacks.load import load
from stacks.schema import Stack

ROOT = Path(__file__).parents[4]


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stack:
    """The shipped stack for one's own machines, on a machine that knows no dstack server."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("DSTACK_PROJECT", "DSTACK_SERVER_URL", "DSTACK_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    return load("onprem", ROOT)


def test_where_no_server_is_known_the_fix_is_named(stack: Stack) -> None:
    with pytest.raises(ConnectionFailed) as error:
        connect(stack)
    assert "no dstack server is known here" in str(error.value)
    assert "flotilla server up" in str(error.value)
    assert len(str(error.value).splitlines()) == 1
