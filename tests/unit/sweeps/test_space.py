"""What a search space may be, and what is said of one that is none."""

from __future__ import annotations

import pytest

from sweeps.space import Choice, Range, corners, parameter, points, read
from trainer.configs.ppo import PpoConfig
from trainer.errors import ConfigError


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("optim.lr=[1e-6,3e-6]", Choice("optim.lr", ("1e-6", "3e-6"))),
        ("algorithm.name=[grpo, rloo]", Choice("algorithm.name", ("grpo", "rloo"))),
        ("optim.betas=[[0.9,0.95],[0.9,0.99]]", Choice("optim.betas", ("[0.9,0.95]", "[0.9,0.99]"))),
        ("reward.args.bonus=[0, 1]", Choice("reward.args.bonus", ("0", "1"))),
        ("algorithm.clip_high=0.2..0.3", Range("algorithm.clip_high", 0.2, 0.3)),
        ("algorithm.clip_high=0.2..0.3/0.05", Range("algorithm.clip_high", 0.2, 0.3, step=0.05)),
        ("optim.lr=1e-6..1e-3", Range("optim.lr", 1e-6, 1e-3, log=True)),
        ("optim.lr=1e-6..1e-3 linear", Range("optim.lr", 1e-6, 1e-3)),
        ("optim.lr=1e-6..2e-6 log", Range("optim.lr", 1e-6, 2e-6, log=True)),
        ("optim.lr=1..2", Range("optim.lr", 1, 2)),  # the setting is a number with a fraction, however its ends are written
        ("trainer.prompts_per_step=8..32", Range("trainer.prompts_per_step", 8, 32, whole=True)),
        ("reward.args.bonus=1..3", Range("reward.args.bonus", 1, 3, whole=True)),
        ("optim.betas=[0.9,0.95]", None),  # the value of a setting that is a list
        ("data.path=../rows.jsonl", None),
        ("trainer.steps=40", None),
    ],
)
def test_a_word_is_a_list_a_range_or_a_setting(word, found):
    assert parameter(PpoConfig, word) == found


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("optim.lr=3..1", "the range is reversed; write 1..3"),
        ("optim.lr=1..1", "the range is empty"),
        ("optim.lr=0..1 log", "a log scale needs ends above 0"),
        ("optim.lr=1..4/1 log", "a log scale has no step"),
        ("optim.lr=1..4/0", "the step must be above 0 and at most 3"),
        ("optim.lr=1..4/5", "the step must be above 0 and at most 3"),
        ("optim.lr=a..b", "is no range"),
        ("optim.lr=1e999..2e999", "the ends must be finite"),
        ("optim.lr=[]", "the list is empty"),
        ("optim.lr=[1e-3,0.001]", "0.001 is there twice"),
        ("optim.lr=[1", "is not YAML"),
        ("optim.lr=[1] 2", "is not YAML"),
        ("reward.args.x=[1, a]", "has values of several types (number, str)"),
        ("trainer.prompts_per_step=0.5..3", "is an integer, and so are the ends"),
        ("algorithm.name=1..3", "a range is of numbers, and algorithm.name is one of grpo"),
        ("run.name=[a,b]", "cannot be set; each trial has a name of its own"),
        ("run.pause_at=3", "cannot be set; the sweep pauses trials"),
        ("optim.lr", "not understood; settings are written key=value"),
    ],
)
def test_what_is_wrong_gets_one_line_with_the_setting_and_its_value(word, line):
    with pytest.raises(ConfigError) as caught:
        parameter(PpoConfig, word)
    text = str(caught.value)
    assert text.startswith(f"command line: {word.partition('=')[0]}") and line in text and "\n" not in text


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["optim.lr=[1,2]", "optim.lr=1..3"], "optim.lr: is searched twice"),
        (["optim.lr=[1,2]", "optim.lr=1"], "optim.lr: is searched and set as well"),
    ],
)
def test_a_setting_is_searched_once(words, line):
    with pytest.raises(ConfigError, match=line):
        read(PpoConfig, words)


def test_a_grid_has_every_combination_and_ends_of_ranges_with_a_step():
    space, fixed = read(PpoConfig, ["optim.lr=[1e-3,1e-2]", "trainer.prompts_per_step=8..16/4", "trainer.steps=5"])
    assert fixed == ["trainer.steps=5"]
    found = [tuple(point.values()) for point in points(space)]
    assert found == [(lr, count) for lr in ("1e-3", "1e-2") for count in ("8", "12", "16")]
    assert [tuple(point.values()) for point in corners(space)] == [(lr, count) for lr in ("1e-3", "1e-2") for count in ("8", "16")]


def test_a_grid_needs_a_step():
    with pytest.raises(ConfigError, match=r"algorithm.clip_high=0.2..0.3: a grid needs a step"):
        list(points([Range("algorithm.clip_high", 0.2, 0.3)]))
