"""verl's reward functions and rows as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.configs.data import DataConfig
from trainer.configs.reward import RewardConfig
from trainer.data import rows
from trainer.episodes import Episode, Prompt, Turn
from trainer.errors import ConfigError
from trainer.rewards import readings, resolve
from trainer.rewards.scorer import Scorer

ROW = {
    "data_source": "own/set",
    "prompt": [{"role": "user", "content": "2+2="}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"split": "train", "index": 3},
}


def read(tmp_path: Path, *found: dict[str, Any]) -> list[dict[str, Any]]:
    file = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist(list(found)), file)
    return [row for _, row in rows.read_rows(DataConfig(path=str(file)))]


def test_the_answer_of_verls_rows_is_their_ground_truth(tmp_path: Path):
    assert read(tmp_path, ROW) == [{**ROW, "answer": "4"}]
    assert read(tmp_path, {**ROW, "answer": "own"})[0]["answer"] == "own"
    assert "answer" not in read(tmp_path, {**ROW, "reward_model": {"style": "model", "ground_truth": None}})[0]
    file = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist([ROW]), file)
    rows.check(DataConfig(path=str(file)), answers=True)


@pytest.mark.parametrize(
    ("function", "args", "worth"),
    [
        ("compute_score", {}, [1.0, 0.0]),
        ("compute_score", {"bonus": 0.5}, [1.5, 0.5]),
        ("compute_score_later", {}, [1.0, 0.0]),
        ("score_object", {}, [1.0, 0.0]),
        ("compute_scores", {}, [1.0, 0.0]),
        ("old_score", {"method": "flexible"}, [1.0, 0.0]),
    ],
)
def test_a_function_of_verl_is_called_as_verl_does(function: str, args: dict[str, Any], worth: list[float], tmp_path: Path):
    [row] = read(tmp_path, ROW)
    resolve(f"support.judges:{function}", args, columns=row)
    batch = [Episode(Prompt(0, [1], row), 0, [Turn([0], [0.0], "stop")], text=text) for text in ("4", "5")]
    with Scorer(RewardConfig(function=f"support.judges:{function}", args=args)) as rewards:
        assert rewards.score(batch) == worth


def test_it_is_a_term_beside_others(tmp_path: Path):
    [row] = read(tmp_path, ROW)
    batch = [Episode(Prompt(0, [1], row), 0, [Turn([0], [0.0], "stop")], text="4")]
    terms = {"verl": {"function": "support.judges:compute_score"}, "right": {"function": "exact"}}
    with Scorer(RewardConfig.model_validate({"terms": terms})) as rewards:
        assert rewards.score(batch) == [2.0]


def test_its_signature_is_said():
    assert readings({"reward": ("support.judges:old_score", {})}, [ROW]) == [
        "reward: support.judges:old_score has verl's signature; it gets solution_str, ground_truth of the answer and its row"
    ]
    assert readings({"reward": ("support.judges:plain", {})}, [ROW]) == []


def test_an_argument_that_it_does_not_take_is_refused():
    with pytest.raises(ConfigError, match=r"reward\.args: got an unexpected keyword argument 'bonos'"):
        resolve("support.judges:compute_score", {"bonos": 1}, columns=ROW)
