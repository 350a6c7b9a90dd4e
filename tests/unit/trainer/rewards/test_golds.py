"""The table golds.tsv: what built-in rewards give to right and wrong answers, kind by kind, and how they say that they read a gold."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from trainer.rewards import REWARDS, check_answer, needs_answer, readings
from trainer.rewards.bounded import Bounded
from trainer.rewards.verifiable import contains, exact, math_verify, numeric

TABLE = [line.split("\t") for line in Path(__file__).with_name("golds.tsv").read_text().splitlines() if not line.startswith("#")]


@pytest.mark.parametrize("reward", ["math_verify", "numeric"])
def test_right_answers_are_worth_one_and_wrong_ones_nothing(reward: str):
    if reward == "math_verify":
        pytest.importorskip("math_verify")
    rows = [row for row in TABLE if row[0] == reward]
    assert len(rows) > 100
    wrong = [
        f"{kind}: gold {gold} text {text} is worth {worth}" for _, kind, gold, text, worth in rows
        if REWARDS[reward](text, {"answer": gold}) != float(worth)
    ]  # fmt: skip
    assert not wrong, "\n".join(wrong)


def test_each_kind_of_the_table_has_right_and_wrong_answers():
    worths: dict[tuple[str, str], set[str]] = {}
    for reward, kind, _, _, worth in TABLE:
        worths.setdefault((reward, kind), set()).add(worth)
    assert [kind for kind, found in worths.items() if found != {"0", "1"} and kind[1] not in ("hostile", "huge")] == []


def test_every_gold_in_a_box_is_right_whatever_it_is():
    pytest.importorskip("math_verify")
    golds = {gold for reward, kind, gold, *_ in TABLE if reward == "math_verify" and kind != "whole"}
    assert [gold for gold in golds if math_verify(f"So it is \\boxed{{{gold}}}.", {"answer": gold}) != 1.0] == []


@pytest.mark.parametrize("text", [r"5^{5^{5^{5}}}", r"9^{9^{9}}", "100000000!", r"10^{10^{10}}", "(" * 3000 + "16" + ")" * 3000])
def test_an_answer_that_no_machine_can_work_out_is_worth_nothing_and_ends_in_time(text: str):
    pytest.importorskip("math_verify")
    assert math_verify(f"\\boxed{{{text}}}", {"answer": "16"}, seconds=0.5) == 0.0
    assert math_verify(r"\boxed{4^2}", {"answer": "16"}) == 1.0


def twice(number: int) -> int:
    if number < 0:
        raise ValueError(number)
    while number == 0:
        pass
    return len(bytes(number << 30)) if number > 9 else 2 * number


def test_a_bounded_function_returns_raises_and_is_ended():
    bounded = Bounded(twice)
    assert bounded(5.0, 4) == 8
    with pytest.raises(ValueError, match="-1"):
        bounded(5.0, -1)
    assert bounded(0.2, 0) is None
    assert bounded(5.0, 4) == 8
    with pytest.raises(MemoryError):
        bounded(5.0, 100)


def test_how_golds_are_read_is_said_in_a_line_for_each():
    pytest.importorskip("math_verify")
    rows = [{"answer": r"2\sqrt{3}"}, {"answer": r"\text{Evelyn}"}, {"answer": "101_2"}, {"answer": ["1/2", "0.5"]}]
    assert readings({"reward": ("math_verify", {})}, rows) == [
        r"reward: math_verify reads the answer of row 0: 2\sqrt{3} -> 2*sqrt(3)",
        r"reward: math_verify reads the answer of row 1: \text{Evelyn} -> the text 'Evelyn'",
        "reward: math_verify reads the answer of row 2: 101_2 -> 101 in base 2",
        "reward: math_verify reads the answer of row 3: 1/2 -> 1/2 or 0.5 -> 1/2",
    ]
    assert readings({"reward.terms.a": ("numeric", {})}, [{"answer": "3 1/2"}]) == [
        "reward.terms.a: numeric reads the answer of row 0: 3 1/2 -> 7/2"
    ]
    assert readings({"reward": ("none", {})}, rows) == []


def test_every_built_in_that_compares_with_an_answer_says_how_it_reads_it():
    said = {name: readings({"reward": (name, {})}, [{"answer": "print(1)" if name == "code" else "1"}]) for name in REWARDS}
    silent = {name for name, lines in said.items() if not lines}
    of_text, elsewhere = {"format_regex", "length", "overlong", "none"}, {"reasoning_gym", "http", "judge", "reward_model"}
    assert silent == of_text | elsewhere
    assert not any(needs_answer(name) for name in silent)


@pytest.mark.parametrize("function", ["exact", "contains", "digits_share", "numeric", "math_verify"])
@pytest.mark.parametrize("answer", ["", " ", [], [""], None, {"a": 1}, [["1"]], float("nan"), b"x", date(2026, 1, 2)])
def test_an_answer_that_is_nothing_to_compare_with_is_refused(function: str, answer: object):
    with pytest.raises(ValueError, match=r"the answer .* is (empty|neither text nor a number)"):
        check_answer({"reward": (function, {})}, {"answer": answer})


def test_numeric_refuses_words():
    with pytest.raises(ValueError, match="the answer 'yes' has no number; math_verify, exact or contains compare texts"):
        check_answer({"reward": ("numeric", {})}, {"answer": "yes"})
    check_answer({"reward": ("numeric", {})}, {"answer": r"\boxed{yes}"})
    check_answer({"reward": ("exact", {})}, {"answer": "yes"})


@pytest.mark.parametrize(
    ("function", "answer", "text", "worth"),
    [
        (exact, ["Paris", "paris"], "paris", 1),
        (exact, ["Paris", "paris"], "PARIS", 0),
        (exact, 62.0, "62", 1),
        (exact, 62, "62.0", 1),
        (exact, "62.0", "62", 0),
        (exact, 62.5, "62", 0),
        (exact, True, "true", 1),
        (exact, 1, "one", 0),
        (contains, ["Paris", "Rome"], "In Rome.", 1),
        (contains, ["Paris", "Rome"], "In Oslo.", 0),
        (contains, ["", "Rome"], "In Oslo.", 0),
        (contains, "", "anything", 0),
        (numeric, [1, 2], "2", 1),
        (numeric, [1, 2], "3", 0),
        (numeric, 62.0, "62", 1),
    ],
)
def test_answers_may_be_several_or_numbers(function, answer, text, worth):
    assert function(text, {"answer": answer}) == worth
