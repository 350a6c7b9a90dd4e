"""The demo's own plumbing; the whole of it is `make demo`."""

from __future__ import annotations

import threading

import pytest

from cluster_tasks import demo


def test_after_an_interrupt_nothing_holds_the_demo(monkeypatch):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo.console, "print", interrupted)
    with pytest.raises(KeyboardInterrupt):
        demo._follow(["echo", "step 1"])
    assert not [thread.name for thread in threading.enumerate() if isinstance(thread, threading.Timer) and not thread.daemon]
