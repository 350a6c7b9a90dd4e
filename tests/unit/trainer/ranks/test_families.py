"""Families of models: with the kernel of `auto`, with adapters, under ZeRO-3 and exported they are those of plain transformers."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from support.families import EXPERTS, FAMILIES, NO_ADAPTERS, PAIR, QUICK, SEE_OTHERS, TEXTS, WITHOUT_SDPA, exported, logprobs, plain
from support.one_rank import started

from trainer.configs.sections import ModelConfig
from trainer.configs.sft import SftConfig
from trainer.errors import ConfigError
from trainer.models import attention, without_weights
from trainer.plan.memory import Shape

pytestmark = pytest.mark.usefixtures("one_rank", "small_buckets")
every_family = pytest.mark.parametrize("kind", [pytest.param(kind, marks=[] if kind in QUICK else [pytest.mark.slow]) for kind in FAMILIES])


def near(expected: torch.Tensor) -> Any:
    return pytest.approx(expected.tolist(), abs=1e-4)


@every_family
def test_auto_takes_a_kernel_that_computes_all_that_the_family_does(tmp_path, kind):
    path = exported(kind, tmp_path / "model")
    worker = started(path, {})
    assert worker.lm.config._attn_implementation == ("eager" if kind in WITHOUT_SDPA else "sdpa")
    assert worker.score(TEXTS, 0).tolist() == near(logprobs(plain(path)))


@every_family
def test_shards_compute_and_export_what_they_were_loaded_from(tmp_path, kind):
    path = exported(kind, tmp_path / "model")
    expected, worker = logprobs(plain(path)), started(path, {"attention": "eager"}, stage=3)
    assert worker.score(TEXTS, 0).tolist() == near(expected)
    worker.export(tmp_path / "again")
    assert torch.equal(logprobs(plain(tmp_path / "again")), expected)


@every_family
def test_trained_adapters_merged_and_read_by_peft_are_those_that_were_trained(tmp_path, kind):
    path = exported(kind, tmp_path / "model")
    if kind in NO_ADAPTERS:
        with pytest.raises(ConfigError, match=rf"^model\.lora\.rank=2: {kind} has no linear layers"):
            started(path, {"lora": {"rank": 2}})
        return
    worker = started(path, {"attention": "eager", "lora": {"rank": 2, "alpha": 4}})
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in worker.lm.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3)
    trained = worker.score(TEXTS, 0)
    worker.export(tmp_path / "merged")
    base = logprobs(plain(path))
    assert (trained - base).abs().max() > 0.1
    assert logprobs(plain(tmp_path / "merged")).tolist() == near(trained)
    assert logprobs(peft.PeftModel.from_pretrained(plain(path), str(tmp_path / "merged" / "adapter"))).tolist() == near(trained)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_plan_and_a_driver_know_each_familys_sizes(kind, tmp_path):
    path = exported(kind, tmp_path / "model")
    config = SftConfig.model_validate({"model": {"path": str(path)}, "data": {"path": "a:b"}, "placement": {"gpus_per_rank": 0}})
    lm = without_weights(config.model)
    assert attention.settle(config, lm, "no GPU").model.attention == ("eager" if kind in WITHOUT_SDPA else "sdpa")
    shape = Shape.of(lm)
    assert shape.parameters == sum(parameter.numel() for parameter in lm.parameters()) and shape.intermediate >= 64
    assert shape.queries > 0 or kind in ("mamba", "mamba2", "falcon_mamba")
    assert shape.alone == (kind in SEE_OTHERS)


@pytest.mark.parametrize(
    ("init", "said"),
    [
        ({"model_type": "roberta"}, "log-probabilities of a text alone differ by"),  # looks at tokens that follow
        ({"model_type": "minimax", **EXPERTS, "num_local_experts": 4, **PAIR}, "log-probabilities of a text alone differ by"),
        ({"model_type": "phimoe", **EXPERTS, "num_local_experts": 4}, "draws experts at random"),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_families_whose_log_probabilities_are_no_ones_are_refused(tmp_path, monkeypatch, init, said):
    kind = init.pop("model_type")
    monkeypatch.setitem(FAMILIES, kind, init)
    with pytest.raises(ConfigError, match=rf"{kind} is not supported: .*{said}"):
        started(exported(kind, tmp_path / "model"), {})


def test_layers_of_unlike_widths_are_looked_at_one_by_one(tmp_path):
    lm = without_weights(ModelConfig(path=str(exported("gemma4_text", tmp_path / "model"))))
    assert len(attention._unfit(lm)) == 1, "heads of 512 numbers, in one layer alone"
    assert Shape.of(lm).queries == 2 * (512 + 32) / 2


def test_latent_attention_is_not_for_varlen_and_its_cache_is_small(tmp_path):
    lm = without_weights(ModelConfig(path=str(exported("deepseek_v3", tmp_path / "model"))))
    assert attention._unfit(lm) == ["keys of 24 numbers and values of 16"]
    assert Shape.of(lm).cached == 16 + 8


@pytest.mark.parametrize(("asked", "said"), [("sdpa", "which sdpa does not apply; use auto or eager"), ("varlen", "; use eager")])
def test_a_soft_cap_of_attention_is_not_left_out(tmp_path, asked, said):
    config = ModelConfig(path=str(exported("gemma2", tmp_path / "model")), attention=asked)
    lm = plain(config.path or "")
    with pytest.raises(ConfigError, match=rf"^model\.attention={asked}: gemma2 has attn_logit_softcapping=5\.0.*{said}"):
        attention.fit(lm, config, torch.device("cpu"))


@pytest.mark.parametrize(
    ("kind", "target", "why"),
    [
        ("deepseek_v3", "gate_proj", "peft reads adapters of this name as those of experts"),
        ("qwen3_next", "mlp.shared_expert.up_proj", "peft reads adapters"),
        ("mamba2", "out_proj", "the model reads its weight by itself"),
        ("gemma3n_text", "correction_coefs", "the model reads its weight by itself"),
    ],
)
def test_targets_that_would_not_learn_are_refused(tmp_path, kind, target, why):
    path = str(exported(kind, tmp_path / "model"))
    with pytest.raises(ConfigError, match=rf"^model\.lora\.targets: {target}: {why}.*; allowed in {kind} are "):
        without_weights(ModelConfig.model_validate({"path": path, "lora": {"rank": 2, "targets": [target]}}))
