"""What rewards of people return, change, print and run: each answer is scored, or fails alone."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from trainer.cli.streams import stdout_is_stderr
from trainer.configs.reward import RewardConfig
from trainer.episodes import Episode, Prompt, Turn
from trainer.errors import ConfigError
from trainer.rewards.scorer import Scorer
from trainer.rewards.trial import try_out


def episodes(*texts: str, **row: Any) -> list[Episode]:
    """Answers to one prompt, with one row."""
    prompt = Prompt(10, [1], row)
    return [Episode(prompt, 0, [Turn([i], [0.0], "stop")], text=text) for i, text in enumerate(texts)]


def scored(batch: list[Episode], **settings: Any) -> list[tuple[float, bool]]:
    with Scorer(RewardConfig.model_validate({"timeout": 60, "on_error": "zero"} | settings)) as rewards:
        rewards.score(batch)
    return [(e.reward, e.failed) for e in batch]


NUMBERS = {"decimal": 0.5, "array of one": 0.5, "int64": 2.0, "bool_": 1.0}
OTHERS = ("huge", "longer than Python writes", "none", "nan", "inf", "complex", "text", "list", "array")


@pytest.mark.parametrize("function", ["odd", "odd_group"])
def test_what_is_no_number_fails_its_answer_alone(function: str):
    found = scored(episodes(*NUMBERS, *OTHERS, *NUMBERS), function=f"support.judges:{function}")
    assert found == [*((worth, False) for worth in NUMBERS.values()), *[(0.0, True)] * len(OTHERS), *((w, False) for w in NUMBERS.values())]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("huge", "returned a number that is too large for a float"),
        ("longer than Python writes", "returned a number that is too large"),
        ("none", "returned None, which is not a number"),
        ("array", r"returned array\(\[1\., 2\.\]\), which is not a number"),
    ],
)
def test_the_error_says_what_was_returned(text: str, message: str):
    with pytest.raises(ConfigError, match=f"odd on row 10 with the text '{text}' {message}"):
        scored(episodes(text), function="support.judges:odd", on_error="fail")


@pytest.mark.parametrize("function", ["takes_its_answer", "takes_all_answers"])
def test_a_reward_may_change_its_row(function: str):
    batch = episodes("a", "b", "a", answer="a", seen=[])
    assert scored(batch, function=f"support.judges:{function}", on_error="fail") == [(1.0, False), (0.0, False), (1.0, False)]
    assert batch[0].prompt.row == {"answer": "a", "seen": []}


def test_terms_do_not_see_each_others_changes_of_a_row():
    terms = {name: {"function": f"support.judges:{name}"} for name in ("takes_its_answer", "takes_all_answers")}
    terms["right"] = {"function": "exact"}
    assert scored(episodes("a", answer="a", seen=[]), terms=terms, on_error="fail") == [(3.0, False)]


@pytest.mark.parametrize("other", ["sleeps", "sleeps_for_all"])
@pytest.mark.parametrize("function", ["runs_a_loop", "runs_in_its_loop"])
def test_a_term_may_run_a_loop_of_its_own_beside_an_async_one(function: str, other: str):
    terms = {"sync": {"function": f"support.judges:{function}"}, "later": {"function": f"support.judges:{other}"}}
    assert scored(episodes("a", "b"), terms=terms, on_error="fail") == [(2.0, False), (1.0, False)]


def test_what_a_reward_prints_is_on_stderr(capfd: pytest.CaptureFixture[str]):
    assert scored(episodes("a"), function="support.judges:shouts") == [(1.0, False)]
    out, err = capfd.readouterr()
    assert "hello" not in out
    assert err.count("hello") == 3


def test_inside_of_stdout_is_stderr_everything_is_printed_there(capfd: pytest.CaptureFixture[str]):
    with stdout_is_stderr():
        print("python")
        os.write(1, b"file")
    print("after")
    sys.stdout.flush()
    out, err = capfd.readouterr()
    assert out == "after\n"
    assert "python" in err
    assert "file" in err


def test_how_the_first_answers_are_read_is_printed_once(capfd: pytest.CaptureFixture[str]):
    rows = [{"answer": "3 1/2"}, {"answer": ["1", "2"]}]
    with Scorer(RewardConfig(function="numeric", workers=2), rows) as rewards:
        rewards.score(episodes("1", answer="1"))
        rewards.score(episodes("1", answer="1"))
    assert capfd.readouterr().out.splitlines() == [
        "reward: numeric reads the answer of row 0: 3 1/2 -> 7/2",
        "reward: numeric reads the answer of row 1: 1 -> 1 or 2 -> 2",
    ]


def test_the_first_answer_to_mathematics_waits_for_no_import():
    pytest.importorskip("math_verify")
    assert scored(episodes(*[r"\boxed{16}"] * 3, answer="16"), function="math_verify", answer_timeout=20) == [(1.0, False)] * 3


def test_a_hostile_answer_ends_neither_its_process_nor_the_run():
    pytest.importorskip("math_verify")
    batch = episodes(r"\boxed{16}", r"\boxed{9^{9^{9}}}", r"\boxed{16}", answer="16")
    with Scorer(RewardConfig(function="math_verify", args={"seconds": 0.5})) as rewards:
        pid = rewards.workers[0].process.pid
        assert rewards.score(batch) == [1.0, 0.0, 1.0]
        assert rewards.workers[0].process.pid == pid


def test_a_persons_reward_is_tried_on_the_first_row(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"missing_column on row 0 with the text '4' raised KeyError\('solution'\) \(judges.py:\d+\)"):
        try_out(RewardConfig(function="support.judges:missing_column"), {"answer": "4"})
    with pytest.raises(ConfigError, match="returned 'good', which is not a number"):
        try_out(RewardConfig(function="support.judges:odd"), {"answer": "text"})
    try_out(RewardConfig(function="support.judges:missing_column", on_error="zero"), {"answer": "4"})
    try_out(RewardConfig(function="support.judges:plain"), {"prompt": "no answer"})


def test_a_reward_that_takes_long_is_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("trainer.rewards.trial.SECONDS", 0.2)
    try_out(RewardConfig(function="support.judges:waits"), {"answer": "b"})
