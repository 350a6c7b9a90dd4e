"""A cloud's notice, from the node that hears it to the head that ends the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster_tasks.node import preemption as module
from cluster_tasks.node.preemption import Preemption
from cluster_tasks.node.settings import read_settings


def of(rank: int) -> Preemption:
    return Preemption.of(read_settings(["--rank", str(rank), "--addresses", "127.0.0.2,127.0.0.3", "--spot", "imdsv2"], {}))


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The checkpoints' folder, which all nodes see."""
    monkeypatch.setenv("FLOTILLA_RUNS", str(tmp_path))
    monkeypatch.setenv("DSTACK_RUN_NAME", "ray")
    return tmp_path


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Answers of the metadata service by path; asked as often as the agent polls."""
    answers: dict[str, str] = {"/latest/api/token": "token"}
    monkeypatch.setattr(module, "metadata", lambda method, path, headers: answers.get(path))
    monkeypatch.setattr(module, "NOTICE_SECONDS", -1)
    return answers


def test_the_head_hears_of_a_workers_notice(runs: Path, service: dict[str, str]) -> None:
    head, worker = of(0), of(1)
    assert worker.poll() is None
    assert head.poll() is None
    service["/latest/meta-data/spot/instance-action"] = '{"action": "terminate"}'
    worker.poll()
    assert head.poll() == "127.0.0.3"


def test_a_notice_of_an_earlier_attempt_is_forgotten(runs: Path, service: dict[str, str]) -> None:
    head = of(0)
    head.clear()  # nothing is there yet
    head.file.write_text("127.0.0.3")
    assert head.poll() == "127.0.0.3"
    head.clear()
    assert head.poll() is None
    assert list(runs.iterdir()) == []


def test_two_runs_do_not_read_one_anothers_notices(runs: Path, service: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    of(0).file.write_text("127.0.0.3")
    monkeypatch.setenv("DSTACK_RUN_NAME", "other")
    assert of(0).poll() is None


def test_the_service_is_not_asked_at_every_poll(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(module, "metadata", lambda method, path, headers: asked.append(path))
    head = of(0)
    head.asked = -1e9
    for _ in range(3):
        head.poll()
    assert len(asked) == 1


def test_without_spot_machines_or_a_shared_folder_nobody_is_asked(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (runs / ".leaving-ray").write_text("127.0.0.3")
    on_demand = Preemption.of(read_settings(["--rank", "0", "--addresses", "127.0.0.2"], {}))
    on_demand.clear()
    assert on_demand.poll() is None
    assert (runs / ".leaving-ray").exists()
    monkeypatch.delenv("FLOTILLA_RUNS")
    assert of(0).poll() is None
