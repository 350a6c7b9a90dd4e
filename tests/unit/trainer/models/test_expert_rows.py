"""Experts of a checkpoint that are sent, or written, some at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.families import FAMILIES, SMALL
from transformers import AutoConfig

from trainer import models, weights
from trainer.configs.sections import ModelConfig
from trainer.models.checkpoint_names import CheckpointNames, apart, rows_of


def bare(kind: str) -> Any:
    known = AutoConfig.for_model(kind).to_dict()
    wanted = {name: value for name, value in (SMALL | FAMILIES[kind]).items() if name in known}
    config = {"init": {"model_type": kind, **wanted}, "tokenizer": "characters:0123456789s="}
    return models.without_weights(ModelConfig.model_validate(config))


def test_experts_are_rows_of_their_own_where_a_checkpoint_has_each():
    for kind, expected in (("mixtral", True), ("qwen3_moe", True), ("deepseek_v3", True), ("gpt_oss", False), ("granitemoe", False)):
        lm = bare(kind)
        found = {apart(lm, name, tuple(tensor.shape)) for name, tensor in models.saved_tensors(lm).items() if ".experts." in name}
        assert found == {expected}, kind
        assert not any(apart(lm, name, tuple(tensor.shape)) for name, tensor in models.saved_tensors(lm).items() if ".experts." not in name)


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3"])
def test_experts_that_come_some_at_a_time_are_those_that_came_together(kind):
    lm = bare(kind)
    tensors = {name: torch.randn(tensor.shape) for name, tensor in models.saved_tensors(lm).items()}
    whole = dict(CheckpointNames(lm).restore([*tensors.items()]))
    found: dict[str, torch.Tensor] = {}
    names = CheckpointNames(lm)
    for name, tensor in tensors.items():
        parameter = weights.Parameter(name, tuple(tensor.shape), "float32", apart=apart(lm, name, tuple(tensor.shape)))
        for bucket in weights.plan([parameter], tensor.nbytes / 2 + 1 if parameter.apart else 1e9):
            found |= dict(names.restore([(part.name, tensor[rows_of(part.name)[1] or slice(None)]) for part in bucket]))
    assert found.keys() == whole.keys() and all(torch.equal(found[name], whole[name]) for name in whole)
