"""Mistakes in data and rewards that a run is refused for before it starts."""

from __future__ import annotations

import importlib
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.preflight import DATA, errors, read

from trainer import preflight
from trainer.cli.import_path import find
from trainer.cluster import placement
from trainer.configs.ppo import PpoConfig
from trainer.data import rows
from trainer.errors import ConfigError

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.usefixtures("runs")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "command line: data.path: {file}: No such file or directory; set a path that {host} can read"),
        ("", "command line: data.path: {file} has no rows; at least one is needed"),
        ("{", "command line: data.path: {file}:1: not JSON: "),
        ('{"prompt": null, "answer": "1"}', "default: data.prompt: {file}:1: column 'prompt' is empty; fill it in, or leave the row out"),
        (
            '{"prompt": "1"}',
            "default: data.answer: {file}:1: column 'answer' is missing; the columns are prompt; set data.answer to one, or add it",
        ),
        (
            '{"question": "1", "answer": "2"}',
            "default: data.prompt: {file}:1: column 'prompt' is missing; the columns are question, answer; set data.prompt to one, "
            "or add it",
        ),
    ],
)
def test_a_file_that_cannot_be_trained_on_is_named(tmp_path, text, message):
    file = tmp_path / "rows.jsonl"
    if text is not None:
        file.write_text(text)
    (line,) = errors("model.path=gpt2", f"data.path={file}")
    assert line.startswith(message.format(file=file, host=socket.gethostname()))


def test_the_answer_column_is_asked_for_where_the_reward_needs_it(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "1"}')
    settings = ["model.path=gpt2", f"data.path={file}", "reward.function=format_regex", "reward.args.pattern=x"]
    assert read(*settings).reward.function == "format_regex"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("data.csv", "is neither a file (.jsonl, .jsonl.gz, .json, .parquet, .arrow, .feather), nor a folder or pattern of them"),
        ("no_such_module:rows", "cannot import it: No module named 'no_such_module'"),
        ("trainer.data.tasks:sort_digit", "has no 'sort_digit'; did you mean 'sort_digits'?"),
    ],
)
def test_a_path_that_is_no_data_is_refused_without_a_start(path, words, capsys):
    (line,) = errors("model.path=gpt2", f"data.path={path}", "--print-config")
    assert line.startswith("command line: data.path: ") and words in line
    assert capsys.readouterr().out == ""


def test_arguments_that_a_function_does_not_take_are_named():
    (line,) = errors("model.path=gpt2", DATA, "data.args.lenght=3")
    assert line.startswith("command line: data.args: got an unexpected keyword argument 'lenght'")


def test_half_a_surrogate_pair_is_one_clear_line(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "\\ud83d\\ude00", "answer": "2"}\n{"prompt": "a\\ud83d", "answer": "2"}\n')
    config = read("model.path=gpt2", f"data.path={file}").data
    found = rows.read_rows(config)
    assert next(found)[1]["prompt"] == "😀"
    with pytest.raises(ConfigError, match=rf"data\.path: {file}:2: column 'prompt': \\ud83d is half of a surrogate pair and no text"):
        next(found)


def test_a_relative_path_is_looked_for_below_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert errors("model.path=gpt2", "data.path=rows.jsonl") == [
        f"command line: data.path: rows.jsonl: No such file or directory; set a path below {tmp_path}, or an absolute one"
    ]


MINE = """
calls = []

def listed(column="prompt"):
    calls.append(column)
    return [{column: "1", "answer": "2"}]

def lazy():
    yield {"prompt": "1", "answer": "2"}

def plain(text, row): return 0.0
def about(text, about): return 0.0
def by_column(text, answer): return 0.0
def more(text, row, prompt): return 0.0
def optional(text, row, prompt=""): return 0.0
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE + "\nfrom trainer.rewards import batched\n@batched\ndef groups(episodes, answer): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return importlib.import_module("mine")


def test_columns_of_rows_that_are_returned_at_once_are_checked_too_and_the_function_is_called_once(mine):
    (line,) = errors("model.path=gpt2", "data.path=mine:listed", "data.args.column=question")
    assert line.startswith(
        "default: data.prompt: mine:listed: row 0: column 'prompt' is missing; the columns are question, answer; set data.prompt"
    )
    config = read("model.path=gpt2", "data.path=mine:listed")
    assert [row for _, row in rows.read_rows(config.data)] == [{"prompt": "1", "answer": "2"}]
    assert mine.calls == ["question", "prompt"]


@pytest.mark.parametrize(
    ("function", "parameter", "takes"),
    [
        ("by_column", "answer", "a text and its row: row['answer']"),
        ("more", "prompt", "a text and its row: row['prompt']"),
        ("groups", "answer", "a list of episodes: episode.prompt.row['answer']"),
    ],
)
def test_a_reward_with_a_column_as_its_parameter_is_refused_with_where_the_column_is(mine, function, parameter, takes):
    assert errors("model.path=gpt2", "data.path=mine:lazy", f"reward.function=mine:{function}") == [
        f"command line: reward.function: parameter {parameter!r} is a column of the data; rewards take {takes}"
    ]


def test_other_names_of_parameters_are_the_persons_own(mine):
    for function in ("plain", "about", "optional"):
        assert read("model.path=gpt2", "data.path=mine:lazy", f"reward.function=mine:{function}")
    assert read("model.path=gpt2", "data.path=mine:lazy", "reward.function=mine:more", "reward.args.prompt=x")
    (line,) = errors("model.path=gpt2", "data.path=no.jsonl", "reward.function=mine:by_column")
    assert line.startswith("command line: data.path: no.jsonl"), "without data there are no columns to compare with"


# --- all together ----------------------------------------------------------------------------------------------------------


def test_every_kind_of_error_is_reported_at_once(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(placement, "RUNNING_RAY", Path("/no/ray"))
    monkeypatch.setattr(preflight, "DRIVERS", ())
    lines = errors(
        "data.path=nope.jsonl", "reward.function=nonsense", "model.path=/no/model", "trainer.steps=0", "algorithm.lam=0.5", start=True
    )
    assert [re.split("[:=]", line.removeprefix("command line: "))[0] for line in lines] == [
        "trainer.steps",
        "algorithm.lam",
        "model.path",
        "data.path",
        "reward.function",
        "placement asks for 2 GPU (1 ranks, 1 rollout engines), the cluster has 0; lower placement.ranks, placement.gpus_per_rank, "
        "rollout.engines or placement.gpus_per_engine or add nodes (flotilla",
    ]


def test_nothing_is_said_of_what_a_wrong_setting_names():
    assert errors("data={args: {}}", "model.path=gpt2")[0].startswith("command line: data.path: is missing")


def test_all_of_it_is_looked_at_before_torch_is_imported(tmp_path):
    code = (
        "import sys, json\nfrom trainer import preflight\nfrom trainer.configs.ppo import PpoConfig\n"
        "config = PpoConfig.model_validate(json.loads(sys.argv[1]))\n"
        "lines = [line for check in (preflight.model, preflight.data, preflight.reward, preflight.cluster) for line in check(config)]\n"
        "print(len(lines), 'torch' in sys.modules)"
    )
    values = {"model": {"path": "/no/model"}, "data": {"path": "x.jsonl"}, "reward": {"function": "x"}, "placement": {"ranks": 4096}}
    env = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    command = [sys.executable, "-c", code, json.dumps(values | {"trainer": {"prompts_per_step": 512}})]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout in ("4 False\n", "3 False\n")  # three where a cluster of this machine with that many CPUs is running


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def score(text, row):\n    retrun 1\n", r"/mine\.py:2: invalid syntax"),
        ("import os\nX = undefined\n", r"/mine\.py:2: NameError: name 'undefined' is not defined"),
        ("raise OSError('no such disk')\n", r"/mine\.py:1: OSError: no such disk"),
    ],
)
def test_a_file_of_ones_own_that_cannot_be_read_is_one_line_with_its_place(tmp_path, monkeypatch, text, said):
    (tmp_path / "mine.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    with pytest.raises(ConfigError, match=r"^reward\.function: mine:score: .*" + said):
        find("mine:score", "reward.function")


def test_an_answer_column_that_is_named_must_be_there_whatever_the_reward_reads(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "solution": "2"}\n')
    config = PpoConfig.model_validate({"model": {"path": "gpt2"}, "data": {"path": f"{tmp_path}/rows.jsonl"}})
    named = config.model_copy(update={"data": config.data.model_copy(update={"answer": "solutoin"})})
    rewarded = {"reward": config.reward.model_copy(update={"function": "operator:mul"})}
    assert preflight.data(config.model_copy(update=rewarded)) == []
    assert "column 'solutoin' is missing; the columns are prompt, solution" in preflight.data(named.model_copy(update=rewarded))[0]
