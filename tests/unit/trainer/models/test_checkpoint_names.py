"""Parameters come to rollout engines by the names that the model's checkpoint has."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from support.families import FAMILIES, exported
from transformers import AutoConfig, AutoModelForCausalLM

from trainer import models
from trainer.models.checkpoint_names import CheckpointNames

EXPERTS = [kind for kind, settings in FAMILIES.items() if "num_experts_per_tok" in settings]


@pytest.mark.parametrize("kind", ["qwen2", *EXPERTS])
def test_they_are_what_save_pretrained_writes_however_they_are_cut(tmp_path, kind):
    path = exported(kind, tmp_path / "model")
    lm = AutoModelForCausalLM.from_pretrained(path)
    with torch.device("meta"):
        names = CheckpointNames(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path)))
    tensors = list(models.saved_tensors(lm).items())
    found = {}
    for start in range(0, len(tensors), 3):
        bucket = [(name, tensor.detach().clone()) for name, tensor in tensors[start : start + 3]]
        found |= {name: tensor.clone() for name, tensor in names.restore(bucket)}
        for _, tensor in bucket:
            tensor.zero_()  # as the bucket's memory is used again
    expected = load_file(path / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_parts_of_one_tensor_wait_for_one_another(monkeypatch):
    def fused(_, tensors):
        return {"qkv": torch.cat([tensors[name] for name in sorted(tensors)])} if "q" in tensors or "k" in tensors else tensors

    monkeypatch.setattr("trainer.models.checkpoint_names.revert_weight_conversion", fused)
    lm = torch.nn.Module()
    for name in ("q", "k", "other"):
        lm.register_parameter(name, torch.nn.Parameter(torch.ones(2)))
    names = CheckpointNames(lm)
    first = torch.full((2,), 5.0)
    assert [*names.restore([("q", first)])] == []
    first.zero_()
    (other, _), (name, whole) = names.restore([("other", torch.ones(1)), ("k", torch.full((2,), 3.0))])
    assert (other, name, whole.tolist()) == ("other", "qkv", [3.0, 3.0, 5.0, 5.0])
