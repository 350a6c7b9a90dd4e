"""Adapters in place of full fine-tuning, one rank in this process."""

from __future__ import annotations

import re
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from support.one_rank import BATCHES, started
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from trainer import models
from trainer.checkpoints.folders import CheckpointError, Checkpoints
from trainer.configs.preferences import RmLossConfig
from trainer.configs.sections import ModelConfig
from trainer.configs.sft import SftConfig
from trainer.data.packing import Sequence
from trainer.errors import ConfigError
from trainer.models.heads import PolicyModel, ScoreModel
from trainer.objectives.pairwise import pairwise
from trainer.offline.loop import optimizer_step
from trainer.ranks.worker import Role, Worker

CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("one_rank", "small_buckets")


def losses(worker: Worker, batches: list[list[Sequence]]) -> list[dict[str, float]]:
    return [optimizer_step(worker, batch) for batch in batches]


def saved_bytes(folder: Path) -> int:
    """Of tensors, in files that torch has written."""
    entries = [entry for file in folder.iterdir() for entry in zipfile.ZipFile(file).infolist()]
    return sum(entry.file_size for entry in entries if "/data/" in entry.filename)


@pytest.mark.parametrize(
    ("dtype", "stage"), [("float32", 0), ("float32", 1), ("bfloat16", 0), ("bfloat16", 1), ("bfloat16", 2), ("bfloat16", 3), ("float32", 3)]
)
def test_four_steps_and_two_after_a_restart_are_six_and_the_checkpoint_has_adapters_alone(tiny_model, tmp_path, dtype, stage):
    start = partial(started, tiny_model, {"lora": {"rank": 2}}, dtype=dtype, stage=stage)
    whole = losses(start(), BATCHES)
    first = start()
    before = losses(first, BATCHES[:4])
    first.save_shard(tmp_path)
    assert first.saved(60)
    again = start()
    again.load_shard(tmp_path)
    assert before + losses(again, BATCHES[4:]) == whole
    assert len({step["loss"] for step in whole}) == 6
    assert all(step["grad_norm"] > 0 for step in whole)
    adapters = sum(parameter.numel for parameter in first.parameters())
    assert 12 * adapters <= saved_bytes(tmp_path / "engine") <= 20 * adapters, "the adapters, their float32 copies, two moments"


def test_at_the_start_the_model_is_its_base_and_adapters_depend_on_the_seed_alone(tiny_model):
    def load(seed: int, **lora: Any) -> Any:
        torch.rand(seed + 1)
        return models.load_lm(
            ModelConfig.model_validate({"path": str(tiny_model), "dtype": "float32", "lora": lora}), seed, CPU, train=True
        )

    before = torch.get_rng_state()
    base, first, same, other = load(0), load(1, rank=4), load(1, rank=4), load(2, rank=4)
    torch.set_rng_state(before)
    ids = torch.tensor([[3, 4, 5, 6]])
    assert torch.equal(first(input_ids=ids).logits, base(input_ids=ids).logits)
    mine, its, others = ({n: p for n, p in lm.named_parameters() if p.requires_grad} for lm in (first, same, other))
    assert all(torch.equal(mine[name], its[name]) for name in mine)
    assert {name for name in mine if not torch.equal(mine[name], others[name])} == {name for name in mine if "lora_A" in name}
    assert all("lora_" in name for name in mine) and len(mine) == 2 * 7 * 2  # A and B of seven layers in two blocks


@pytest.mark.parametrize("stage", [0, 3])
def test_the_exported_model_and_the_exported_adapters_on_the_base_are_the_same(tiny_model, tmp_path, stage):
    worker = started(tiny_model, {"lora": {"rank": 4, "alpha": 6, "targets": ["q_proj", "down_proj"]}}, stage=stage)
    losses(worker, BATCHES)
    worker.export(tmp_path / "model", {"README.md": b"card"})
    ids = torch.tensor([[3, 4, 5, 6, 7]])
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    alone = base(input_ids=ids).logits
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)(input_ids=ids).logits
    with_adapters = peft.PeftModel.from_pretrained(base, str(tmp_path / "model" / "adapter"))(input_ids=ids).logits
    torch.testing.assert_close(merged, with_adapters, atol=1e-5, rtol=1e-4)
    assert (merged - alone).abs().max() > 0.05
    exported, original = (load_file(folder / "model.safetensors") for folder in (tmp_path / "model", tiny_model))
    assert exported.keys() == original.keys()
    assert {name for name in original if not torch.equal(exported[name], original[name])} == {
        f"model.layers.{i}.{name}.weight" for i in range(2) for name in ("self_attn.q_proj", "mlp.down_proj")
    }


@pytest.mark.parametrize("stage", [0, 3])
def test_a_reward_models_head_is_trained_beside_its_adapters_and_exported_with_both(tiny_model, tmp_path, stage):
    def role(config: SftConfig) -> Role:
        return Role("policy", ScoreModel, 0, config.optim, partial(pairwise, RmLossConfig()), config.updates(), 2, classifier=True)

    start = partial(started, tiny_model, {"lora": {"rank": 4}}, role, stage=stage)
    pairs = [[Sequence(ids.response_ids, ids.response_ids[-1:]) for ids in batch] for batch in BATCHES]
    whole, worker = losses(start(), pairs), start()
    assert {p.name for p in worker.parameters() if "lora_" not in p.name} == {"score.weight"}
    before = losses(worker, pairs[:4])
    worker.save_shard(tmp_path / "checkpoint")
    assert worker.saved(60)
    again = start()
    again.load_shard(tmp_path / "checkpoint")
    assert before + losses(again, pairs[4:]) == whole and whole[-1]["loss"] != whole[0]["loss"]
    again.export(tmp_path / "model")
    ids = torch.tensor([[3, 4, 5, 6, 7]])
    base = AutoModelForSequenceClassification.from_pretrained(tiny_model, dtype=torch.float32, num_labels=1)
    alone = base(input_ids=ids).logits
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", dtype=torch.float32)(input_ids=ids).logits
    with_adapters = peft.PeftModel.from_pretrained(base, str(tmp_path / "model" / "adapter"))(input_ids=ids).logits
    torch.testing.assert_close(merged, with_adapters, atol=1e-5, rtol=1e-4)
    assert (merged - alone).abs() > 0.01


def test_what_does_not_learn_has_no_adapters(tiny_model):
    reference = started(tiny_model, {"lora": {"rank": 4}}, lambda _: Role("reference", PolicyModel, 0))
    assert not any("lora" in name for name, _ in reference.lm.named_parameters())


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ({"targets": ["q_prj"]}, "model.lora.targets: qwen2 has no q_prj; did you mean q_proj? It has q_proj, k_proj, v_proj, o_proj, "),
        ({"targets": ["q_proj", "xyzzy"]}, "model.lora.targets: qwen2 has no xyzzy; it has q_proj, "),
        ({"targets": ["lm_head"]}, "model.lora.targets: lm_head is not a linear layer below the head; allowed are q_proj, "),
        ({"targets": ["embed_tokens"]}, "model.lora.targets: embed_tokens is not a linear layer below the head; allowed are q_proj, "),
        ({"targets": ["mlp"]}, "model.lora.targets: mlp is not a linear layer below the head; allowed are q_proj, "),
    ],
)
@pytest.mark.parametrize("load", [lambda config: models.load_lm(config, 0, CPU), models.without_weights])
def test_targets_that_are_no_layers_of_the_model_are_refused_with_those_that_are(tiny_model, lora, said, load):
    with pytest.raises(ConfigError, match=re.escape(said)):
        load(ModelConfig.model_validate({"path": str(tiny_model), "lora": {"rank": 4, **lora}}))


def test_a_checkpoint_of_adapters_is_refused_on_another_base_of_the_same_shape(tiny_model, tmp_path):
    other = tmp_path / "other"
    config = ModelConfig(path=str(tiny_model), dtype="float32")
    lm = models.load_lm(config, 0, CPU)
    with torch.no_grad():
        lm.model.layers[1].mlp.up_proj.weight.mul_(1.5)
    models.export(lm, lm.state_dict(), models.load_tokenizer(config), other)
    mine, same, its = (started(path, {"lora": {"rank": 4}}).fingerprint() for path in (tiny_model, tiny_model, other))
    assert mine == same
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    with checkpoints.writing(1, {"model": mine}):
        pass
    last = checkpoints.latest()
    assert last
    last.require_model(same)
    with pytest.raises(CheckpointError, match="another model"):
        last.require_model(its)
