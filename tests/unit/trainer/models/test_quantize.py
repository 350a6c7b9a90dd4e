"""QLoRA: adapters over weights in 4 bits, one rank in this process."""

from __future__ import annotations

from functools import partial
from typing import Any

import peft
import pytest
import torch
from support.one_rank import BATCHES, started
from transformers import AutoModelForCausalLM

from trainer import models, preflight
from trainer.configs.preferences import RmLossConfig
from trainer.configs.sections import ModelConfig
from trainer.configs.sft import SftConfig
from trainer.data.packing import Sequence
from trainer.errors import ConfigError
from trainer.models import quantize
from trainer.models.heads import PolicyModel, ScoreModel
from trainer.objectives.pairwise import pairwise
from trainer.offline.loop import optimizer_step
from trainer.plan import memory
from trainer.ranks.worker import Role

CPU = torch.device("cpu")
QLORA = {"lora": {"rank": 4, "quantize": "nf4"}}
IDS = torch.tensor([[3, 4, 5, 6, 7]])

pytestmark = pytest.mark.usefixtures("one_rank", "small_buckets")


def load(path: Any, dtype: str, **lora: Any) -> Any:
    return models.load_lm(ModelConfig.model_validate({"path": str(path), "dtype": dtype, "lora": lora}), 0, CPU, train=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_linear_layers_have_4_bits_and_what_they_stand_for_is_the_same_quantized_again(wide_model, tmp_path, dtype):
    lm = load(wide_model, dtype, rank=4, quantize="nf4")
    linear = [p for name, p in lm.named_parameters() if name.endswith("base_layer.weight")]
    assert len(linear) == 14, "seven in each of two blocks"
    assert all(p.dtype == torch.uint8 and 2 * p.numel() == quantize.whole(p).numel() for p in linear)
    trained = {name for name, p in lm.named_parameters() if p.requires_grad}
    assert len(trained) == 28 and all("lora_" in name for name in trained)
    bare = load(wide_model, dtype, quantize="nf4")
    table = {name: quantize.whole(p) for name, p in bare.named_parameters()}
    models.export(bare, table, models.load_tokenizer(ModelConfig(path=str(wide_model))), tmp_path / "initial")
    for name, p in load(tmp_path / "initial", dtype, quantize="nf4").named_parameters():
        assert torch.equal(quantize.whole(p), table[name]), name
    both = (tmp_path / "initial", wide_model)
    stands, original = (AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)) for path in both)
    assert torch.equal(stands(input_ids=IDS).logits, bare(input_ids=IDS).logits), "plain weights give what the 4 bits give"
    assert torch.equal(bare.eval()(input_ids=IDS).logits, stands(input_ids=IDS).logits)
    far = {name: float((table[name] - p).norm() / p.norm()) for name, p in original.named_parameters() if not torch.equal(table[name], p)}
    assert len(far) == 14 and all(0.05 < share < 0.12 for share in far.values()), "about a tenth, as normal numbers in NF4 have"


@pytest.mark.parametrize(("dtype", "stage"), [("float32", 0), ("float32", 2), ("bfloat16", 1), ("bfloat16", 2)])
def test_a_restart_changes_no_bit_and_the_export_is_what_was_trained(wide_model, tmp_path, dtype, stage):
    start = partial(started, wide_model, QLORA, dtype=dtype, stage=stage)
    worker = start()
    whole = [optimizer_step(worker, batch) for batch in BATCHES]
    first = start()
    before = [optimizer_step(first, batch) for batch in BATCHES[:4]]
    first.save_shard(tmp_path / "checkpoint")
    assert first.saved(60)
    again = start()
    again.load_shard(tmp_path / "checkpoint")
    assert again.fingerprint() == worker.fingerprint()
    assert before + [optimizer_step(again, batch) for batch in BATCHES[4:]] == whole
    assert len({step["loss"] for step in whole}) == 6 and all(step["grad_norm"] > 0 for step in whole)
    again.export(tmp_path / "model")
    kind, near = getattr(torch, dtype), {"float32": 1e-5, "bfloat16": 0.1}[dtype]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=kind)
    assert not hasattr(merged.config, "quantization_config")
    trained = again.lm(input_ids=IDS).logits
    torch.testing.assert_close(merged(input_ids=IDS).logits, trained, rtol=near, atol=near)
    base = AutoModelForCausalLM.from_pretrained(wide_model, **quantize.settings(kind, CPU), dtype=kind)  # as peft's pages say
    quantize.settle(base)
    adapters = peft.PeftModel.from_pretrained(base, str(tmp_path / "model/adapter"))
    torch.testing.assert_close(adapters(input_ids=IDS).logits, trained, rtol=near, atol=near)


def test_a_reward_models_head_is_not_quantized(wide_model):
    def role(config: SftConfig) -> Role:
        return Role("policy", ScoreModel, 0, config.optim, partial(pairwise, RmLossConfig()), config.updates(), 2, classifier=True)

    worker = started(wide_model, QLORA, role)
    assert worker.lm.score.weight.dtype == torch.float32 and worker.lm.score.weight.requires_grad
    pairs = [[Sequence(ids.response_ids, ids.response_ids[-1:]) for ids in batch] for batch in BATCHES]
    steps = [optimizer_step(worker, batch) for batch in pairs]
    assert all(step["grad_norm"] > 0 for step in steps)


def test_the_reference_is_quantized_too_and_has_no_adapters(wide_model):
    reference = started(wide_model, QLORA, lambda _: Role("reference", PolicyModel, 0))
    names = dict(reference.lm.named_parameters())
    assert not any("lora" in name for name in names)
    assert names["model.layers.0.mlp.up_proj.weight"].dtype == torch.uint8
    reference.offload()
    reference.reload()
    assert reference.lm(input_ids=IDS).logits.isfinite().all()


def test_without_bitsandbytes_it_is_said_how_to_get_it(wide_model, monkeypatch):
    monkeypatch.setattr(preflight, "find_spec", lambda _: None)
    config = SftConfig.model_validate({"model": {"path": str(wide_model), **QLORA}, "data": {"path": "x.jsonl"}, "trainer": {"steps": 1}})
    (error,) = preflight.model(config)
    assert error.startswith("model.lora.quantize=nf4: bitsandbytes is not installed in this environment; pip install")


def test_a_plan_counts_a_scale_for_each_block(wide_model):
    lm = load(wide_model, "bfloat16", rank=4, quantize="nf4")
    settings = {"path": str(wide_model), "dtype": "bfloat16", **QLORA}
    shape = memory.Shape.of(models.without_weights(ModelConfig.model_validate(settings)))
    config = SftConfig.model_validate({"model": settings, "data": {"path": "x.jsonl"}, "trainer": {"steps": 1}})
    there = sum(p.nbytes + (p.quant_state.absmax.nbytes if hasattr(p, "quant_state") else 0) for p in lm.parameters())
    assert memory.states(config, shape, 1)["weights"] == there


def test_layers_whose_rows_end_within_a_block_are_refused(tiny_model):
    with pytest.raises(ConfigError, match=r"^model.lora.quantize=nf4: model.layers.0.self_attn.q_proj has 32 inputs; blocks of 64"):
        load(tiny_model, "float32", rank=4, quantize="nf4")
