"""What preflight says of the rows that a reward gets, before anything starts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from trainer import preflight
from trainer.configs.ppo import PpoConfig


def said(tmp_path: Path, reward: dict[str, Any], *answers: Any, **changes: Any) -> list[str]:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": "2+2=", "answer": answer}) + "\n" for answer in answers))
    return preflight.reward(PpoConfig.model_validate({"model": {"path": "x"}, "data": {"path": str(file)}, "reward": reward} | changes))


@pytest.mark.parametrize(
    ("function", "answers", "message"),
    [
        ("numeric", ["62", "yes"], "2: the answer 'yes' has no number; math_verify, exact or contains compare texts; fix the row, or"),
        ("contains", ["Paris", " "], "2: the answer ' ' is empty"),
        ("exact", [["a"], []], r"2: the answer \[\] is empty"),
        ("exact", [{"a": 1}], "1: the answer {'a': 1} is neither text nor a number"),
        ("code", ["assert f() == 1", ""], r"2: row\['answer'\] has a test that tests nothing: ''"),
        ("code", ['[{"input": "1"}]'], r"1: row\['answer'\] has the test {'input': '1'}"),
    ],
)
def test_answers_that_a_built_in_cannot_compare_with_are_named_with_their_line(function, answers, message, tmp_path: Path):
    pytest.importorskip("math_verify")
    [line] = said(tmp_path, {"function": function}, *answers)
    assert line.startswith(f"data.answer: {tmp_path}/rows.jsonl:")
    assert line.endswith(f"another reward than {function}")
    assert re.search(message, line)


def test_sets_to_evaluate_on_are_looked_at_too_by_their_names(tmp_path: Path):
    hard = tmp_path / "hard.jsonl"
    hard.write_text('{"prompt": "a", "answer": "62"}\n{"prompt": "a", "answer": "no"}\n')
    [line] = said(
        tmp_path, {"function": "numeric"}, "62", evals={"hard": {"path": str(hard)}}, trainer={"eval_prompts": 0, "eval_every": 1}
    )
    assert line.startswith(f"evals.hard.answer: {hard}:2: the answer 'no' has no number")


def test_right_rows_say_nothing(tmp_path: Path):
    assert said(tmp_path, {"function": "numeric"}, "3 1/2", [1, 2], 62.0) == []
    assert said(tmp_path, {"function": "none"}, "") == []
    assert said(tmp_path, {"function": "support.judges:plain"}, "") == []


def test_a_persons_reward_is_called_once_on_the_first_row(tmp_path: Path):
    [line] = said(tmp_path, {"function": "support.judges:missing_column"}, "4")
    assert line.startswith("reward.function: missing_column on row 0 with the text '4' raised KeyError('solution') (judges.py:")
