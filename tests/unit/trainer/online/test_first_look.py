"""--print-config reads all rows of local files, as a start does before it has any process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainer import evaluate, train_dpo, train_ppo, train_rm, train_sft
from trainer.errors import ConfigError

SHAPE = {"model_type": "qwen2", "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
MODEL = [
    f"model.init={json.dumps(SHAPE | {'max_position_embeddings': 64})}",
    "model.tokenizer=characters:0123456789+=",
    "placement.gpus_per_rank=0",
]
ONLINE = [*MODEL, "rollout.engine=hf", "rollout.max_new_tokens=8", "trainer.eval_prompts=2", "reward.function=exact"]
GOOD = [{"prompt": f"{i}+1=", "answer": str(i + 1), "chosen": str(i + 1), "rejected": "0"} for i in range(20)]
pytestmark = pytest.mark.usefixtures("runs")


def rows(folder: Path, *more: dict[str, object], few: int = 20) -> str:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*GOOD[:few], *more]))
    return f"data.path={folder / 'rows.jsonl'}"


def said(read, *argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read([*argv, "--print-config"])
    return str(caught.value)


NO_ANSWER = "default: data.answer: {file}:21: column 'answer' is missing; the columns are prompt; set data.answer to one, or add it"
TOO_LONG = "command line: rollout.max_new_tokens=8: row 20 of data.path has 60 tokens, and the model has 64 positions for both; lower it"
NO_TRAINING = "command line: trainer.eval_prompts=21: data.path has 21 prompts; leave some to train on"


@pytest.mark.parametrize(
    ("row", "setting", "error"),
    [
        ({"prompt": "x", "answer": "1"}, "run.seed=1", "default: data.prompt: {file}:21: model.tokenizer has no token for 'x'; add it to"),
        ({"prompt": "1"}, "run.seed=1", NO_ANSWER),
        ({"prompt": "1" * 60, "answer": "1"}, "run.seed=1", TOO_LONG),
        ({"prompt": "1", "answer": "1"}, "trainer.eval_prompts=21", NO_TRAINING),
    ],
)
def test_each_row_of_a_run_is_looked_at(tmp_path, row, setting, error):
    assert said(train_ppo.read, *ONLINE, rows(tmp_path, row), setting).startswith(error.format(file=tmp_path / "rows.jsonl"))


def test_prompts_that_are_all_too_long_are_no_data(tmp_path):
    found = said(train_ppo.read, *ONLINE, rows(tmp_path), "data.max_prompt_tokens=2")
    assert found == f"command line: data.max_prompt_tokens: all 20 prompts of {tmp_path / 'rows.jsonl'} are longer than 2 tokens"


def test_rows_that_are_right_print_the_settings_and_load_no_torch_here(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        train_ppo.read([*ONLINE, rows(tmp_path), "--print-config"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("run:\n")


@pytest.mark.parametrize(
    ("read", "row", "setting", "error"),
    [
        (train_sft.read, {"answer": "x"}, "run.seed=1", "default: data.answer: row 20: model.tokenizer has no token for 'x'"),
        (train_sft.read, {"answer": "1" * 80}, "run.seed=1", "row 20 has 81 tokens with its answer, and the model has 64 positions"),
        (train_sft.read, {"answer": "1" * 2000}, "trainer.micro_batch_tokens=1100", "row 20 of data.path has 2001 tokens; raise it"),
        (train_rm.read, {"chosen": "2", "rejected": "2"}, "run.seed=1", "data.rejected: row 20: both answers are '2'"),
        (train_dpo.read, {"chosen": "2", "rejected": "3"}, "trainer.eval_prompts=21", "data.path has 21 prompts; leave some"),
    ],
)
def test_each_row_of_the_other_trainers_is_looked_at(tmp_path, read, row, setting, error):
    assert error in said(read, *MODEL, rows(tmp_path, {"prompt": "1", **row}), setting)


def test_an_evaluation_looks_at_its_own_rows(tmp_path, tiny_model):
    (tmp_path / "run.yaml").write_text("{}")
    (tmp_path / "other.jsonl").write_text('{"prompt": "y", "answer": "1"}\n')
    args, rest = evaluate.arguments(
        [
            str(tmp_path / "run.yaml"),
            "--print-config",
            *ONLINE[1:],
            rows(tmp_path),
            f"evals.other.path={tmp_path}/other.jsonl",
            f"model.path={tiny_model}",
        ]
    )
    with pytest.raises(ConfigError, match=r"evals\.other\.prompt: \S+other\.jsonl:1: model\.tokenizer has no token for 'y'"):
        evaluate.read(args, rest)
