"""What settings name is looked at before anything starts, and all errors are reported together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer import preflight
from trainer.cli import parse
from trainer.configs.ppo import PpoConfig
from trainer.data import rows
from trainer.errors import ConfigError

ROOT = Path(__file__).parents[2]
DATA = "data.path=trainer.data.tasks:sort_digits"
pytestmark = pytest.mark.usefixtures("runs")


def read(*argv: str, start: bool = False) -> PpoConfig:
    checks = (preflight.model, preflight.data, preflight.reward)
    return parse(list(argv), prog="x", model=PpoConfig, checks=checks, before_start=(preflight.cluster,) if start else ())


def errors(*argv: str, start: bool = False) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(*argv, start=start)
    return str(caught.value).splitlines()


def model_folder(folder: Path, *files: str) -> Path:
    folder.mkdir(parents=True)
    for name in files:
        (folder / name).write_text("{}")
    return folder


# --- models ----------------------------------------------------------------------------------------------------------------


def test_hub_names_pass_and_missing_folders_do_not():
    assert read(DATA, "model.path=Qwen/Qwen3-0.6B").model.path == "Qwen/Qwen3-0.6B"
    for path in ("./model", "/no/model", "a/b/c", "~/no-such-model"):
        assert errors(DATA, f"model.path={path}")[0].startswith(f"model.path={path}: no such folder; a hub name has the form")


def test_run_name_means_the_model_that_the_run_exported(runs):
    line = f"model.path=run:warm: that run has exported no model to {runs}/warm/model; no run in {runs} has (command line)"
    assert errors(DATA, "model.path=run:warm") == [line]
    folder = model_folder(runs / "warm" / "model", "config.json", "model.safetensors", "tokenizer.json")
    assert read(DATA, "model.path=run:warm").model.path == str(folder)
    assert errors(DATA, "model.path=run:worm")[0].endswith("; runs that have: warm (command line)")


@pytest.mark.parametrize(
    ("files", "missing"),
    [
        ([], "config.json and no weights and no tokenizer"),
        (["config.json", "tokenizer.json"], "weights"),
        (["config.json", "model.safetensors"], "tokenizer"),
        (["pytorch_model.bin", "vocab.json"], "config.json"),
    ],
)
def test_a_folder_that_is_no_model_is_named_with_what_is_missing(tmp_path, files, missing):
    folder = model_folder(tmp_path / "model", *files)
    assert errors(DATA, f"model.path={folder}") == [f"model.path={folder}: the folder has no {missing} (command line)"]


def test_a_tokenizer_of_its_own_spares_the_models(tmp_path):
    folder = model_folder(tmp_path / "model", "config.json", "model.safetensors")
    assert read(DATA, f"model.path={folder}", "model.tokenizer=characters:01").model.path == str(folder)


# --- data ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "data.path: {file}: No such file or directory (command line)"),
        ("", "data.path: {file} has no rows (command line)"),
        ("{", "data.path: {file}:1: not JSON: "),
        ('{"prompt": "1"}', "data.answer: {file}:1: column 'answer' is missing; the columns are prompt (default)"),
        (
            '{"question": "1", "answer": "2"}',
            "data.prompt: {file}:1: column 'prompt' is missing; the columns are question, answer (default)",
        ),
    ],
)
def test_a_file_that_cannot_be_trained_on_is_named(tmp_path, text, message):
    file = tmp_path / "rows.jsonl"
    if text is not None:
        file.write_text(text)
    (line,) = errors("model.path=gpt2", f"data.path={file}")
    assert line.startswith(message.format(file=file))


def test_the_answer_column_is_asked_for_where_the_reward_needs_it(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "1"}')
    settings = ["model.path=gpt2", f"data.path={file}", "reward.function=format_regex", "reward.args.pattern=x"]
    assert read(*settings).reward.function == "format_regex"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("openai/gsm8k", "neither a .jsonl or .parquet file nor package.module:function; data sets of the hub are not supported"),
        ("no_such_module:rows", "cannot import it: No module named 'no_such_module'"),
        ("trainer.data.tasks:sort_digit", "has no 'sort_digit'; did you mean 'sort_digits'?"),
    ],
)
def test_a_path_that_is_no_data_is_refused_without_a_start(path, words, capsys):
    (line,) = errors("model.path=gpt2", f"data.path={path}", "--print-config")
    assert line.startswith("data.path: ") and words in line and line.endswith("(command line)")
    assert capsys.readouterr().out == ""


def test_arguments_that_a_function_does_not_take_are_named():
    (line,) = errors("model.path=gpt2", DATA, "data.args.lenght=3")
    assert line.startswith("data.args: got an unexpected keyword argument 'lenght'")


def test_half_a_surrogate_pair_is_one_clear_line(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "\\ud83d\\ude00", "answer": "2"}\n{"prompt": "a\\ud83d", "answer": "2"}\n')
    config = read("model.path=gpt2", f"data.path={file}").data
    found = rows.read_rows(config)
    assert next(found)[1]["prompt"] == "😀"
    with pytest.raises(ConfigError, match=rf"data\.path: {file}:2: \\ud83d is half of a surrogate pair and no text"):
        next(found)


# --- all together ----------------------------------------------------------------------------------------------------------


def test_every_kind_of_error_is_reported_at_once(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(preflight, "RUNNING_RAY", Path("/no/ray"))
    monkeypatch.setattr(preflight, "DRIVERS", ())
    lines = errors(
        "data.path=nope.jsonl", "reward.function=nonsense", "model.path=/no/model", "trainer.steps=0", "algorithm.lam=0.5", start=True
    )
    assert [line.partition(":")[0].partition("=")[0] for line in lines] == [
        "trainer.steps",
        "algorithm.lam",
        "model.path",
        "data.path",
        "reward.function",
        "placement asks for 2 GPU (1 ranks, 1 rollout engines), the cluster has 0; lower placement.ranks, placement.gpus_per_rank, "
        "rollout.engines or placement.gpus_per_engine or add nodes (flotilla",
    ]


def test_nothing_is_said_of_what_a_wrong_setting_names():
    assert [line.partition(":")[0] for line in errors("data.path=[1]", "model.path=gpt2")] == ["data.path=[1]"]


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
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout in ("4 False\n", "3 False\n")  # three where a cluster of this machine with that many CPUs is running
