"""What the policy said before a run was killed: found again for the same question alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from trainer.environments.journal import Batch, Journal
from trainer.environments.policy import Request
from trainer.environments.runner import Asked
from trainer.episodes import Prompt, Turn

PROMPTS = [Prompt(7, [1], {}), Prompt(9, [2], {})]
DID = [['{"exec": "date"}', "a"]]


def asked(turn: int, ids: list[int], commands: list[list[str]] | None = None, prompt: int = 0) -> Asked:
    return Asked(((prompt, 0), turn), Request(ids, 5), commands or [])


def said(token: int) -> Turn:
    return Turn([token], [-0.5], "stop", version=3)


def batch(folder: Path, settings: object = 1, version: int = 3, seed: int = 5) -> Batch:
    return Journal(folder / "turns", settings).batch(version, PROMPTS, 1, seed, False)


def test_the_same_question_has_the_same_turn_and_another_none(tmp_path, capsys):
    first = batch(tmp_path)
    first.add([(asked(1, [1]), said(10)), (asked(1, [2], prompt=1), said(11))])
    first.add([(asked(2, [1, 10, 5], DID), said(12))])
    then = batch(tmp_path)
    assert then.turn(asked(1, [1])) == said(10) and then.turn(asked(1, [2], prompt=1)) == said(11)
    assert then.turn(asked(2, [1, 10, 5], DID)) == said(12) and then.turn(asked(3, [1])) is None
    then.end(PROMPTS)
    assert capsys.readouterr().out == "step 4: 3 turns are those from before the run was resumed\n"


@pytest.mark.parametrize(
    ("ids", "commands", "turn", "what"),
    [
        ([1, 10, 6], [['{"exec": "date"}', "b"]], None, '{"exec": "date"}'),  # which the policy reads
        ([1, 10, 5], [['{"exec": "date"}', "b"]], said(12), '{"exec": "date"}'),  # which it does not
        ([1, 10, 5], [*DID, ['{"exec": "ls"}', "c"]], said(12), "a command more or less"),
        ([1, 10, 7], DID, None, "what it asked the policy"),
    ],
)
def test_an_episode_that_did_something_else_is_named(ids, commands, turn, what, tmp_path, capsys):
    batch(tmp_path).add([(asked(2, [1, 10, 5], DID), said(12))])
    then = batch(tmp_path)
    assert then.turn(asked(2, ids, commands)) == turn
    then.end(PROMPTS)
    assert capsys.readouterr().out.endswith(f"step 4: 1 episodes did not do what they did before: row 7: {what}\n")


def test_a_round_that_was_being_written_is_left_out_and_written_again(tmp_path):
    first = batch(tmp_path)
    first.add([(asked(1, [1]), said(10))])
    size = first.file.stat().st_size
    first.add([(asked(2, [1, 10]), said(11))])
    first.file.write_bytes(first.file.read_bytes()[:-3])
    then = batch(tmp_path)
    assert len(then.known) == 1 and first.file.stat().st_size == size
    then.add([(asked(2, [1, 10]), said(12))])
    assert batch(tmp_path).turn(asked(2, [1, 10])) == said(12)


def test_other_settings_weights_seeds_and_prompts_have_turns_of_their_own(tmp_path):
    batch(tmp_path).add([(asked(1, [1]), said(10))])
    assert not batch(tmp_path, version=4).known and not batch(tmp_path, seed=6).known
    assert not Journal(tmp_path / "turns", 1).batch(3, PROMPTS[:1], 1, 5, False).known
    assert batch(tmp_path).known
    assert not batch(tmp_path, settings=2).known and not batch(tmp_path).known, "those of other settings are removed"


def test_turns_older_than_a_checkpoint_are_forgotten(tmp_path):
    for version in (2, 3, 11):
        batch(tmp_path, version=version).add([(asked(1, [1]), said(10))])
    Journal(tmp_path / "turns", 1).forget(3)
    assert sorted(int(file.name.partition("-")[0]) for file in (tmp_path / "turns").glob("*-*")) == [3, 11]


def test_a_disk_that_is_full_and_experts_that_are_too_many_cost_turns_and_no_run(tmp_path):
    first = batch(tmp_path)
    first.add([(asked(1, [1]), Turn([10], [-0.5], "stop", experts=np.zeros((1, 1, 1), np.uint8)))])
    assert not first.file.exists()
    first.file.mkdir()  # stands for a disk that takes nothing
    first.add([(asked(1, [1]), said(10))])
    first.end(PROMPTS)
    assert not batch(tmp_path).known
