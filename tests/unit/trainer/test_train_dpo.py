"""Where the reference's log-probabilities of an answer are, and KTO's distance from the reference, by one rank in this process."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainer.cluster.actors import free_port
from trainer.configs.preferences import DpoConfig
from trainer.ranks.worker import Worker
from trainer.train_dpo import Dpo

pytestmark = pytest.mark.usefixtures("one_rank", "small_buckets")


def task(model: Path, folder: Path, rows: list[dict[str, Any]], **data: Any) -> Dpo:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"path": str(file), "max_prompt_tokens": 4, **data},
        "algorithm": {"loss": "kto" if "label" in data else "sigmoid"},
        "trainer": {"prompts_per_step": 2, "micro_batch_tokens": 64, "steps": 1},
        "placement": {"gpus_per_rank": 0},
    }
    return Dpo(DpoConfig.model_validate(values))


def started(dpo: Dpo) -> Worker:
    worker = Worker(dpo.config, dpo.role(), 0, 1, None, 1)
    worker.start("127.0.0.1", free_port())
    return worker


def test_each_answer_has_the_reference_of_its_own_tokens_though_rows_were_dropped(tiny_model, tmp_path):
    pairs = [{"prompt": prompt, "chosen": "12" + prompt, "rejected": "21"} for prompt in ("123456789", "3", "12345678", "45", "6")]
    dpo = task(tiny_model, tmp_path, pairs)
    rows, worker = dpo.rows(), started(dpo)
    assert [row.index for row in rows] == [1, 3, 4]
    dpo.prepare(worker, rows, tmp_path, fresh=True)
    for row in rows:
        answers = dpo.sequences(row)
        found = np.concatenate([answer.tokens["reference"] for answer in answers])
        assert found.tolist() == pytest.approx(worker.score(answers, 0).tolist(), abs=1e-5)


@pytest.mark.parametrize(("gained", "kl"), [(0.5, 2.0), (0.0, 0.0), (-0.5, 0.0)])
def test_the_distance_of_kto_is_the_mean_gain_over_other_answers_and_at_least_0(tiny_model, tmp_path, gained, kl):
    """Three answers of four tokens each, of which the policy has gained so much on the reference."""
    labelled = [{"prompt": str(i), "answer": "123", "label": bool(i % 2)} for i in range(3)]
    dpo = task(tiny_model, tmp_path, labelled, label="label")
    rows, worker = dpo.rows(), started(dpo)
    dpo.prepare(worker, rows, tmp_path, fresh=True)
    assert {len(s.response_ids) for s in dpo.mismatched.values()} == {4}
    for sequence in dpo.mismatched.values():
        sequence.tokens = {"reference": sequence.tokens["reference"] - gained}
    assert dpo.numbers(worker, rows)["kl"] == pytest.approx(kl, abs=1e-5)
