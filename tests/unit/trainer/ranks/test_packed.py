"""Families whose packed sequences see each other, and what a run does about it; weights that are buffers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.one_rank import started
from transformers import AutoConfig, AutoModelForCausalLM

from trainer import models
from trainer.configs.sections import ModelConfig
from trainer.data.packing import Sequence

pytestmark = pytest.mark.usefixtures("one_rank", "small_buckets")

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "gemma3_text": {"head_dim": 8, "sliding_window": 8},
    "qwen3_moe": {**EXPERTS, "num_experts": 4},
    "gpt_oss": {**EXPERTS, "num_local_experts": 4},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1},
    "bloom": {"n_head": 4, "n_layer": 2},
    "glm4_moe": {**EXPERTS, "n_routed_experts": 4},
}
SEE_OTHERS = {"gpt_oss", "falcon_h1", "bloom"}
TEXTS = [Sequence([3, 4, 5], [6, 7]), Sequence([8, 3], [4, 9, 10, 11, 5, 6]), Sequence([5], [12, 3, 4])]


def exported(kind: str, folder: Path, dtype: str = "float32") -> Path:
    """A model of the family with random weights, buffers included."""
    known = AutoConfig.for_model(kind).to_dict()
    init = {"model_type": kind, **{name: value for name, value in (SMALL | FAMILIES[kind]).items() if name in known}}
    settings = {"init": init, "tokenizer": "characters:0123456789s=", "dtype": dtype, "attention": "eager"}
    config = ModelConfig.model_validate(settings)
    lm = models.load_lm(config, 0, torch.device("cpu"))
    for _, buffer in models.saved_buffers(lm):
        buffer.normal_(0, 0.1)
    models.export(lm, lm.state_dict(), models.load_tokenizer(config), folder)
    return folder


@pytest.mark.parametrize("kind", FAMILIES)
def test_sequences_do_not_see_each_other_in_any_family(tmp_path, kind):
    path = exported(kind, tmp_path / "model")
    worker = started(path, {"attention": "eager"})
    assert worker.alone == (kind in SEE_OTHERS)
    plain = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    expected = []
    for text in TEXTS:
        ids = [*text.prompt_ids, *text.response_ids]
        with torch.no_grad():
            logprobs = plain(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float().log_softmax(-1)
        expected += [float(logprobs[at - 1, ids[at]]) for at in range(len(text.prompt_ids), len(ids))]
    assert worker.score(TEXTS, 0).tolist() == pytest.approx(expected, abs=2e-5)
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


def test_a_model_that_cannot_compute_is_refused_at_start(tmp_path, monkeypatch):
    def refuse(*_: Any) -> None:
        raise RuntimeError("expected m1 and m2 to have the same dtype")

    monkeypatch.setattr("trainer.ranks.packed.seen", refuse)
    with pytest.raises(models.ConfigError, match=r"qwen2 in float32 cannot compute a micro-batch of this trainer: expected m1"):
        started(exported("qwen2", tmp_path / "model"), {})
