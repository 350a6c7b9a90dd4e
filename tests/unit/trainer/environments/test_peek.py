"""The environment `peek` and its rows: who looks is paid, and who does not is right a quarter of the time."""

from __future__ import annotations

from typing import Any

import pytest
from support.seeing import of_qwen
from support.talks import Talk

from trainer.data.shapes import COLOURS, colours, moves
from trainer.environments.peek import peek
from trainer.environments.policy import Policy
from trainer.errors import ConfigError


def played(row: dict[str, Any], *texts: str) -> tuple[Talk, float]:
    talk, found = Talk(of_qwen(), *texts, prompt=row["prompt"]), []

    async def once(policy: Policy) -> None:
        found.append(await peek(policy, row))

    talk.run(once)
    return talk, found[0]


def test_each_turn_shows_the_next_picture_and_the_right_one_is_paid():
    rows = list(colours(8, seed=1))
    for row in rows:
        talk, reward = played(row, *["m|"] * row["answer"], "t|")
        assert reward == 1
        shots = [request.pictures[-1] for request in talk.requests]
        assert [shot.hash for shot in talk.policy.sequences[0].pictures] == [shot.hash for shot in shots]
        for shot, colour in zip(shots, row["colours"], strict=False):
            drawn = {rgb for _, rgb in shot.image().getcolors() or ()}
            assert drawn == {COLOURS[colour], (245, 245, 245)}, "its shapes have the row's colour"
        other = (row["answer"] + 1) % 4
        assert played(row, *["m|"] * other, "t|")[1] == 0
    assert played(rows[0], *["m|"] * 4)[1] == 0 and played(rows[0], "r")[1] == 0


def test_the_same_row_shows_the_same_pictures():
    [row] = colours(1, seed=3)
    first, second = (played(row, "m|", "m|", "t|")[0].requests[-1].pictures for _ in range(2))
    assert [one.hash for one in first] == [one.hash for one in second] and len({one.hash for one in first}) == 3


def test_rows_ask_for_a_colour_that_one_picture_has():
    rows = list(colours(400, seed=2))
    assert all(row["colours"].count(row["prompt"]) == 1 and row["colours"][row["answer"]] == row["prompt"] for row in rows)
    for place in range(4):
        assert 0.15 < sum(row["answer"] == place for row in rows) / len(rows) < 0.35, "nobody is right without a look"
    assert {row["prompt"] for row in colours(50, asked=["g"])} == {"g"}
    with pytest.raises(ConfigError, match=r"data\.args\.asked: \['x'\]; some of r, g, b"):
        list(colours(1, asked=["x"]))


def test_moves_to_learn_the_form_from_say_nothing_of_the_pictures():
    pairs = list(zip(moves(600, seed=4), colours(600, seed=4), strict=True))
    for move, row in pairs:
        assert move["prompt"].count("<image>") == len(move["images"]) and move["prompt"].startswith(row["prompt"])
    right = [(row["colours"][len(move["images"]) - 1] == row["prompt"]) == (move["answer"] == "t") for move, row in pairs]
    assert 0.42 < sum(right) / len(right) < 0.58
