"""Full disks and killed processes: each is reported once."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from cluster_tasks.node import health as module
from cluster_tasks.node.health import Health, oom_kills
from cluster_tasks.node.settings import read_settings


class Disk(NamedTuple):
    total: int
    used: int
    free: int


def test_a_disk_is_reported_when_it_gets_full_and_again_after_it_was_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FLOTILLA_RUNS", str(tmp_path))
    settings = read_settings(["--rank", "0", "--addresses", "127.0.0.2", "--temp-dir", str(tmp_path / "none")], {})
    health = Health.of(settings)
    assert health.folders == [str(tmp_path)], "a folder that is not there has no disk"
    free, reports = [10, 9, 9, 500, 5], []
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Disk(1000 << 20, 0, free.pop(0) << 20))
    while free:
        health.report()
        reports.append(len(caplog.records))
    assert reports == [0, 1, 1, 1, 2], "1% is left of 1000 MB at 10 MB"
    assert caplog.messages[0] == f"disk full: {tmp_path} has 9 of 1000 MB left"


def test_processes_that_the_kernel_killed_are_counted_from_when_the_agent_started(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    killed = 3
    monkeypatch.setattr(module, "oom_kills", lambda: killed)
    health = Health.of(read_settings(["--rank", "0", "--addresses", "127.0.0.2"], {}))
    health.folders.clear()
    health.report()
    killed = 5
    health.report()
    health.report()
    assert [message.partition(":")[2].partition(" on")[0] for message in caplog.messages] == [" the kernel killed 2 processes"]


def test_the_kernels_count_is_read() -> None:
    assert oom_kills() >= 0
