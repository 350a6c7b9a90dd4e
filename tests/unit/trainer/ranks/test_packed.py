"""Families of models: log-probabilities of packed sequences are those of plain transformers; weights that are buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.families import FAMILIES, SEE_OTHERS, TEXTS, exported, logprobs, plain
from support.one_rank import started

from trainer import models
from trainer.models import heads

pytestmark = pytest.mark.usefixtures("one_rank", "small_buckets")


@pytest.mark.parametrize("kind", FAMILIES)
def test_sequences_do_not_see_each_other_in_any_family(tmp_path, kind):
    path = exported(kind, tmp_path / "model")
    worker = started(path, {"attention": "eager"})
    assert worker.alone == (kind in SEE_OTHERS)
    assert worker.score(TEXTS, 0).tolist() == pytest.approx(logprobs(plain(path)).tolist(), abs=2e-5)
    assert worker.packing()["alone"] == (kind in SEE_OTHERS), "the driver counts micro-batches as the rank does"


@pytest.mark.parametrize("stage", [0, 3])
def test_buffers_that_are_saved_are_exported_and_synced(tmp_path, stage):
    path = exported("glm4_moe", tmp_path / "model", "bfloat16")
    worker = started(path, {"attention": "eager"}, dtype="bfloat16", stage=stage)
    worker.export(tmp_path / "again")
    before, after = (load_file(folder / "model.safetensors") for folder in (path, tmp_path / "again"))
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert before[name].any() and before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) and before[key].dtype == after[key].dtype for key in before)
    assert name in {parameter.name for parameter in worker.parameters()}


def test_frequencies_of_positions_stay_float32_where_weights_are_sharded_bfloat16(tmp_path):
    whole, sharded = (started(exported("qwen2", tmp_path / "model", "bfloat16"), {}, dtype="bfloat16", stage=stage) for stage in (0, 3))
    expected, found = (dict(worker.lm.named_buffers())["model.rotary_emb.inv_freq"] for worker in (whole, sharded))
    assert found.dtype == torch.float32 and torch.equal(found, expected)


def test_a_model_whose_logits_are_not_those_of_its_head_is_refused_at_start(tmp_path, monkeypatch):
    monkeypatch.delitem(heads.AFTER_HEAD, "logit_scale")
    with pytest.raises(models.ConfigError, match=r"model\.path=.*: cohere is not supported: its own log-prob.* differ by [0-9.]+ from"):
        started(exported("cohere", tmp_path / "model"), {"attention": "eager"})


def test_a_model_that_cannot_compute_is_refused_at_start(tmp_path, monkeypatch):
    def refuse(*_: Any) -> None:
        raise RuntimeError("expected m1 and m2 to have the same dtype")

    monkeypatch.setattr("trainer.ranks.packed.seen", refuse)
    with pytest.raises(models.ConfigError, match=r"qwen2 in float32 cannot compute a micro-batch of this trainer: expected m1"):
        started(exported("qwen2", tmp_path / "model"), {})
