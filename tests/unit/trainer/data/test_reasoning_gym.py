"""reasoning-gym: every task makes rows, its scorer scores them, and what it does not know is one error before torch is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from support.configs import BASE, unplaced

from trainer import preflight
from trainer.cli import parse
from trainer.configs.ppo import PpoConfig
from trainer.configs.reward import RewardConfig
from trainer.data.reasoning_gym import make, task
from trainer.data.rows import RETURNED
from trainer.episodes import Episode, Prompt, Turn
from trainer.errors import ConfigError
from trainer.rewards.gym import reasoning_gym
from trainer.rewards.scorer import Scorer

TASK = "data.path=trainer.data.reasoning_gym:task"
NO_SINGLE_ANSWER = {"graph_color", "rubiks_cube", "boxnet", "rush_hour", "propositional_logic"}  # a plan, a proof: only scored

GENEROUS = {"game_of_life_halting"}  # its scorer takes every text for right


def names() -> list[str]:
    pytest.importorskip("reasoning_gym")
    from reasoning_gym.factory import DATASETS

    return [name for name in DATASETS if name != "composite"]


def errors(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse([BASE[0], *argv], prog="x", model=PpoConfig, checks=[preflight.data, preflight.reward])
    return str(caught.value).splitlines()


def test_every_task_makes_rows_whose_answers_its_scorer_gives_1():
    """Through JSON, as rows of a file would come; a wrong answer is worth less, also one that no scorer can parse."""
    without, generous = set(), set()
    for name in names():
        rows = json.loads(json.dumps(make(name, rows=2, seed=0, config={}), sort_keys=True))
        for row in rows:
            if "answer" in row:
                assert reasoning_gym(row["answer"], row) == 1, name
                assert reasoning_gym(f"I think <answer>\n{row['answer']}\n</answer>", row) == 1, name
            else:
                without.add(name)
            worth = [reasoning_gym(wrong, row) for wrong in ("", "no such answer")]
            assert all(0 <= each <= 1 for each in worth), name
            if max(worth) == 1:
                generous.add(name)
    assert (without, generous) == (NO_SINGLE_ANSWER, GENEROUS)


def test_an_answer_is_not_run_as_python(tmp_path):
    made = tmp_path / "made"
    for name in ("string_insertion", "spiral_matrix", "binary_matrix"):
        (row,) = make(name, rows=1, seed=0, config={})
        assert reasoning_gym(f"[open({str(made)!r}, 'w').close()]", row) < 1
        assert not made.exists(), name


def test_rows_are_the_same_in_every_process_and_follow_seed_and_settings():
    """isomorphic_strings draws from sets of strings: their order hangs on PYTHONHASHSEED."""
    code = "import json; from trainer.data.reasoning_gym import task; print(json.dumps(task('isomorphic_strings', rows=5)))"
    runs = [
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True, timeout=300
        )
        for seed in ("1", "2")
    ]
    assert runs[0].stdout == runs[1].stdout
    sums = task("chain_sum", rows=3, seed=1, min_terms=2, max_terms=2)
    assert [row["prompt"].count("+") + row["prompt"].count(" - ") for row in sums] == [1, 1, 1]
    assert sums == task("chain_sum", rows=3, seed=1, min_terms=2, max_terms=2) != task("chain_sum", rows=3, min_terms=2, max_terms=2)
    assert {"task", "config", "metadata", "prompt", "answer"} == set(sums[0])


def test_a_batch_is_scored_in_processes_of_their_own():
    rows = task("chain_sum", rows=2) + make("countdown", rows=1, seed=0, config={})
    texts = [rows[0]["answer"], f"<think>1</think><answer>{rows[1]['answer']}</answer>", "0"]
    episodes = [
        Episode(Prompt(i, [1], row), i, [Turn([i], [0.0], "stop")], text=text)
        for i, (row, text) in enumerate(zip(rows, texts, strict=True))
    ]
    with Scorer(RewardConfig(function="reasoning_gym", timeout=120, workers=2)) as rewards:
        scores = rewards.score(episodes)
    assert scores[:2] == [1, 1]
    assert 0 <= scores[2] < 1


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("chain_sums", {}, "data.args.name: no 'chain_sums'; near it: chain_sum, "),
        ("qqqq", {}, "data.args.name: no 'qqqq'; known are "),
        ("composite", {}, "data.args.name: no 'composite'; "),
        ("chain_sum", {"min_term": 2}, "data.args.min_term: chain_sum has no such setting; it has min_terms, "),
        ("chain_sum", {"min_terms": 9}, "data.args: chain_sum refuses these settings: max_terms must be >= min_terms; choose others"),
    ],
)
def test_what_a_task_does_not_know_is_one_error_of_whoever_makes_its_rows(name, config, message):
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ConfigError) as caught:
        make(name, rows=2, seed=0, config=config)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["name=chain_sum", "min_terms=few"], "data.args.min_terms='few': Input should be a valid integer"),
        (["name=chain_sum", "rows=0"], "data.args.rows: 0; must be an integer >= 1"),
        ([], "data.args: missing a required argument: 'name'; task takes "),
    ],
)
def test_what_a_task_does_not_know_is_one_error(settings, message):
    pytest.importorskip("reasoning_gym")
    (line,) = errors(TASK, "reward.function=exact", *(f"data.args.{setting}" for setting in settings))
    assert unplaced(line).startswith(message)


def test_the_reward_asks_for_its_own_rows(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (line,) = errors(f"data.path={file}", "reward.function=reasoning_gym")
    assert line.startswith("command line: reward.function: reasoning_gym scores rows of its own tasks; set data.path=")


def test_without_the_package_source_and_reward_say_what_to_install(monkeypatch):
    RETURNED.clear()
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    found = errors(TASK, "data.args.name=chain_sum", "reward.function=reasoning_gym")
    assert [line.partition(";")[2].partition(" (")[0] for line in found] == [" pip install reasoning-gym"] * 2
    assert [unplaced(line).partition(":")[0] for line in found] == ["data.path", "reward.function"]
