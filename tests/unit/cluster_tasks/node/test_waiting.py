"""The waits of the agent and of the commands: what they say, and how they end."""

from __future__ import annotations

import logging
import time

import pytest

from cluster_tasks.node import waiting
from cluster_tasks.node.errors import NOT_READY, Failure, Stopped
from cluster_tasks.node.settings import read_settings
from cluster_tasks.node.waiting import pause, wait, wait_until

SETTINGS = read_settings(["--rank", "0", "--addresses", "127.0.0.2", "--join-timeout", "7"], {})


def test_each_change_is_said_once() -> None:
    lines, said = ["two", "two", "one", None], []
    assert wait_until(lambda: lines.pop(0), time.monotonic() + 60, said.append, sleep=lambda _: None) is None
    assert said == ["two", "one"]
    assert not lines


def test_what_stays_missing_is_said_again_after_a_while() -> None:
    lines, said = ["two", "two", "two", None], []
    assert wait_until(lambda: lines.pop(0), time.monotonic() + 60, said.append, sleep=lambda _: None, repeat=-1) is None
    assert said == ["two", "two", "two"]


def test_the_deadline_returns_what_is_missing_and_success_at_the_deadline_counts() -> None:
    assert wait_until(lambda: "one", time.monotonic() - 1, lambda _: None) == "one"
    assert wait_until(lambda: None, time.monotonic() - 1, lambda _: None) is None


def test_the_agent_ends_at_the_deadline_with_code_76_and_the_setting(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(Failure, match=r"^waiting for 10\.0\.0\.2: not within 7 s \(--join-timeout\)$") as late:
        wait(lambda: "waiting for 10.0.0.2", SETTINGS, time.monotonic() - 1)
    assert late.value.code == NOT_READY
    lines = ["waiting for 10.0.0.2", None]
    with caplog.at_level(logging.INFO):
        wait(lambda: lines.pop(0), SETTINGS, time.monotonic() + 60)
    assert "waiting for 10.0.0.2, 60 s left" in caplog.text


def test_a_signal_ends_a_pause_and_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "signals", [15])
    with pytest.raises(Stopped):
        pause(60)
    with pytest.raises(Stopped):
        wait(lambda: "one", SETTINGS, time.monotonic() + 60)
