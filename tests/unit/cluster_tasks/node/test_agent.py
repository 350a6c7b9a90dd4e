"""The agent from its command line to its exit code."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster_tasks.node import agent
from cluster_tasks.node.errors import NODE_LOST, NOT_READY, RAY_FAILED, UNFIT, Failure, HeadEnded
from cluster_tasks.recipes.job import nodes

COMMAND = ["--rank", "1", "--addresses", "127.0.0.1,127.0.0.2"]


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """The agent's signal handlers are gone after each test."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("program", "flags"),
    [("ray", []), ("torchrun", ["--torchrun", "-m trainer.train_sft"])],
)
def test_an_image_without_the_program_is_one_line_and_exit_code_2(
    program: str, flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert agent.main([*COMMAND, *flags]) == 2
    assert f"`{program}` is not on PATH" in capsys.readouterr().err


def test_exit_codes_are_those_that_the_page_lists() -> None:
    """Schedulers, recipes and people go by the numbers."""
    page = (Path(__file__).parents[4] / "docs/dstack.md").read_text()
    listed = {int(code): says for code, says in re.findall(r"^\| (\d+) \| (.+) \|$", page, re.MULTILINE)}
    words = {NODE_LOST: "a node was lost", NOT_READY: "did not come together", RAY_FAILED: "Ray ended", UNFIT: "burn-in"}
    assert all(said in listed[code] for code, said in words.items())
    assert nodes.LOST == NODE_LOST


@pytest.mark.parametrize(("ended", "code"), [(Failure(NODE_LOST, "the head is gone"), NODE_LOST), (HeadEnded(), 0)])
def test_how_a_worker_ends_is_the_agents_exit_code(ended: Exception, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(settings: object) -> int:
        raise ended

    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr(agent, "run_worker", end)
    monkeypatch.setattr(agent, "quick_checks", lambda *_: [])
    monkeypatch.setattr(agent, "claim_checkpoints", lambda *_: [])
    assert agent.main(COMMAND) == code


def test_ray_gets_the_stacks_token_whichever_env_sh_was_sourced_last(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "theirs", "FLOTILLA_TOKEN_ON_PREM": "ours"}.items():
        monkeypatch.setenv(name, value)
    seen: list[tuple[str | None, ...]] = []
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr(agent, "run_node", lambda here: seen.append((here.dashboard.token, os.environ["RAY_AUTH_TOKEN"])) or 0)
    monkeypatch.setattr(agent, "quick_checks", lambda *_: [])
    monkeypatch.setattr(agent, "claim_checkpoints", lambda *_: [])
    assert agent.main([*COMMAND, "--stack", "on-prem"]) == 0
    assert seen == [("ours", "ours")] and "FLOTILLA_TOKEN_ON_PREM" not in os.environ
