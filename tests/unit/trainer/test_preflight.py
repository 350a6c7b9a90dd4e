"""What settings name is looked at before anything starts, and all errors are reported together."""

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
from support.json_server import JsonHandler, served

from trainer import preflight
from trainer.cli import parse
from trainer.cli.import_path import find
from trainer.configs.ppo import PpoConfig
from trainer.data import rows
from trainer.data.positions import positions
from trainer.errors import ConfigError

ROOT = Path(__file__).parents[3]
DATA = "data.path=trainer.data.tasks:sort_digits"
pytestmark = pytest.mark.usefixtures("runs")


def read(*argv: str, start: bool = False) -> PpoConfig:
    checks = (preflight.options, preflight.model, preflight.split, preflight.data, preflight.reward)
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
        assert errors(DATA, f"model.path={path}")[0].startswith(f"command line: model.path={path}: no such folder; a hub name has the form")


@pytest.mark.parametrize("path", ["my model", "-x", "org/na--me", "org/a b", "a..b", "s3://bucket/m", "org/model.", "org/mödel", "a:b"])
def test_what_cannot_be_a_hub_name_is_a_missing_folder(path):
    assert errors(DATA, f"model.path={path}") == [
        f"command line: model.path={path}: no such folder; a hub name has the form organization/name"
    ]


class Hub(JsonHandler):
    def do_GET(self) -> None:
        self.send(200 if self.path == "/api/models/org/there" else 404, {"id": "org/there"})

    def end_headers(self) -> None:
        if self.path != "/api/models/org/there":
            self.send_header("X-Error-Code", "RepoNotFound")
        super().end_headers()


def test_the_hub_is_asked_for_models_before_a_start(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "models--org--cached" / "snapshots" / "1" / "config.json").mkdir(parents=True)
    away = "give a folder, or fetch it where there is a network with python -m cluster_tasks.cache org/no"
    with served(Hub) as address:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        assert not preflight.hub(
            read(DATA, "model.path=org/there", "model.tokenizer=org/cached", "algorithm.kl={coef: 1, reference: org/there}")
        )
        assert preflight.hub(read(DATA, "model.path=org/there", "algorithm.kl={coef: 1, reference: org/no}")) == [
            "algorithm.kl.reference=org/no: neither a folder here nor a model of the hub that you may read; check the name, or set HF_TOKEN"
        ]
    assert preflight.hub(read(DATA, "model.path=org/no")) == [
        f"model.path=org/no: no such folder here, the hub cannot be reached (ConnectError) and the cache has no copy; {away}"
    ]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert preflight.hub(read(DATA, "model.path=org/no")) == [
        f"model.path=org/no: no such folder here, HF_HUB_OFFLINE is set and the cache has no copy; {away}"
    ]


@pytest.mark.parametrize(
    ("shape", "most"),
    [
        ({"max_position_embeddings": 64}, 64),
        ({"n_positions": 1024}, 1024),
        ({"max_position_embeddings": 64, "rope_scaling": {"type": "linear", "factor": 4.0}}, 256),
        ({"max_position_embeddings": 64, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, 64),
        ({"max_position_embeddings": 64, "rope_scaling": None}, 64),
        ({}, None),
    ],
)
def test_a_model_has_the_positions_that_vllm_finds(shape, most):
    assert positions(shape) == most


def test_vllm_starts_for_no_more_tokens_than_the_model_has_positions():
    sized = [DATA, f"model.init={json.dumps({'model_type': 'qwen2', 'max_position_embeddings': 64})}", "model.tokenizer=characters:0"]
    short = ["data.max_prompt_tokens=32", "rollout.max_new_tokens=32"]
    why = "that is 65 tokens; the model has 64 positions; lower one"
    assert not preflight.positions(read(*sized, *short))
    assert preflight.positions(read(*sized, *short, "rollout.max_new_tokens=33")) == [
        f"data.max_prompt_tokens=32: with rollout.max_new_tokens=33 {why}"
    ]
    episodes = ["environment.function=guess", "environment.max_tokens=33"]
    assert preflight.positions(read(*sized, *short, *episodes)) == [f"data.max_prompt_tokens=32: with environment.max_tokens=33 {why}"]
    assert not preflight.positions(read(*sized, *short, "rollout.max_new_tokens=33", "rollout.options.hf_overrides={a: 1}"))
    assert not preflight.positions(read(*sized, *short, "rollout.max_new_tokens=33", "rollout.engine=hf"))


SHAPE = {"num_attention_heads": 12, "num_key_value_heads": 3, "num_hidden_layers": 4}


@pytest.mark.parametrize(
    ("shape", "setting", "error"),
    [
        (SHAPE, "tensor_parallel=5", "rollout.tensor_parallel=5: the model's 12 attention heads do not divide by it; 1, 2, 3, 4, 6, 12 do"),
        (SHAPE, "tensor_parallel=2", "rollout.tensor_parallel=2: the model's 3 key-value heads do not divide by it; 1, 3 do"),
        ({"text_config": SHAPE}, "tensor_parallel=5", "rollout.tensor_parallel=5: the model's 12 attention heads do not divide by it"),
        (SHAPE, "pipeline_parallel=5", "rollout.pipeline_parallel=5: the model has 4 layers; 4 or fewer"),
        (SHAPE, "expert_parallel=true", "rollout.expert_parallel=true: the model has no experts; leave it false"),
    ],
)
def test_a_model_that_cannot_be_cut_into_an_engines_parts_is_refused(tmp_path, shape, setting, error):
    folder = model_folder(tmp_path / "model", "model.safetensors", "tokenizer.json")
    (folder / "config.json").write_text(json.dumps(shape))
    more = ["rollout.tensor_parallel=2"] if setting.startswith("expert") else []
    found = errors(DATA, f"model.path={folder}", "placement.ranks=1", *more, f"rollout.{setting}")
    assert any(error in line for line in found), found


@pytest.mark.parametrize(
    ("ranks", "pairs", "error"),
    [
        (5, 3, "trainer.sequence_parallel=5: the model's 12 attention heads do not divide by it; 1, 2, 3, 4, 6, 12 do"),
        (2, 3, "trainer.sequence_parallel=2: the model's 3 key-value heads do not divide by it; 1, 3 do"),
        (6, 3, ""),
        (2, 6, ""),
    ],
)
def test_heads_that_ranks_cannot_share_are_refused(tmp_path, ranks, pairs, error):
    folder = model_folder(tmp_path / "model", "model.safetensors", "tokenizer.json")
    (folder / "config.json").write_text(json.dumps(SHAPE | {"num_key_value_heads": pairs}))
    config = read(DATA, f"model.path={folder}", f"trainer.sequence_parallel={ranks}", f"placement.ranks={ranks}")
    assert preflight.shared(config) == ([error] if error else [])


@pytest.mark.parametrize("setting", ["tensor_parallel=6", "tensor_parallel=12", "pipeline_parallel=4"])
def test_a_model_that_can_is_not(tmp_path, setting):
    folder = model_folder(tmp_path / "model", "model.safetensors", "tokenizer.json")
    (folder / "config.json").write_text(json.dumps(SHAPE | {"num_key_value_heads": 6}))
    assert read(DATA, f"model.path={folder}", f"rollout.{setting}").model.path == str(folder)


def test_options_that_this_vllm_does_not_know_are_refused_with_the_nearest():
    assert errors(DATA, "model.path=Qwen/Qwen3-0.6B", "rollout.options={enforce_eagre: true, xyzzy: [1]}") == [
        "command line: rollout.options.enforce_eagre=true: this vLLM has no such argument; did you mean enforce_eager?",
        "command line: rollout.options.xyzzy=[1]: this vLLM has no such argument; its EngineArgs lists them",
    ]
    assert read(DATA, "model.path=Qwen/Qwen3-0.6B", "rollout.options.enforce_eager=true").rollout.options == {"enforce_eager": True}


def test_run_name_means_the_model_that_the_run_exported(runs):
    assert errors(DATA, "model.path=run:warm") == [
        f"command line: model.path=run:warm: that run has exported no model to {runs}/warm/model; let it train to its end first; "
        f"no run in {runs} has one"
    ]
    folder = model_folder(runs / "warm" / "model", "config.json", "model.safetensors", "tokenizer.json")
    assert read(DATA, "model.path=run:warm").model.path == str(folder)
    assert errors(DATA, "model.path=run:worm")[0].endswith("; runs that have: warm")


@pytest.mark.parametrize(
    ("files", "missing"),
    [
        ([], "config.json and no weights and no tokenizer; give one that save_pretrained() wrote"),
        (["config.json", "tokenizer.json"], "weights; give one that save_pretrained() wrote"),
        (["config.json", "model.safetensors"], "tokenizer; set model.tokenizer"),
        (["pytorch_model.bin", "vocab.json"], "config.json; give one that save_pretrained() wrote"),
    ],
)
def test_a_folder_that_is_no_model_is_named_with_what_is_missing(tmp_path, files, missing):
    folder = model_folder(tmp_path / "model", *files)
    assert errors(DATA, f"model.path={folder}") == [f"command line: model.path={folder}: the folder has no {missing}"]


def test_a_tokenizer_of_its_own_spares_the_models(tmp_path):
    folder = model_folder(tmp_path / "model", "config.json", "model.safetensors")
    assert read(DATA, f"model.path={folder}", "model.tokenizer=characters:01").model.path == str(folder)


# --- data ------------------------------------------------------------------------------------------------------------------


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
    monkeypatch.setattr(preflight, "RUNNING_RAY", Path("/no/ray"))
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
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True, timeout=60)
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
