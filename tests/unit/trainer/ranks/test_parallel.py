"""Which parts of a model ranks have: what DeepSpeed is asked for, and what is refused before it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.families import FAMILIES, SMALL
from torch import nn
from transformers import AutoConfig

from trainer import models
from trainer.configs.sections import ModelConfig, TrainerConfig
from trainer.errors import ConfigError
from trainer.plan import memory
from trainer.ranks import loading, parallel
from trainer.ranks.worker import Worker


def built(kind: str, **changes: Any) -> Any:
    known = AutoConfig.for_model(kind).to_dict()
    wanted = {name: value for name, value in (SMALL | FAMILIES[kind] | changes).items() if name in known}
    lm = models.without_weights(
        ModelConfig.model_validate({"init": {"model_type": kind, **wanted}, "tokenizer": "characters:0123456789s="})
    )
    model: Any = nn.Module()
    model.lm = lm
    return model


def asked(kind: str, **ways: Any) -> dict[str, Any]:
    return parallel.settings(built(kind), TrainerConfig(**ways), torch.device("cpu"))


def test_without_parts_deepspeed_is_asked_for_nothing():
    assert asked("qwen3") == {}


def test_matrices_are_cut_as_transformers_says_and_the_head_is_whole():
    specs = asked("qwen3", tensor_parallel=2)["tensor_parallel"]["partition_config"]["layer_specs"]
    kinds = {pattern.split("\\.")[-2]: spec["partition_type"] for spec in specs for pattern in spec["patterns"]}
    assert kinds["q_proj"] == kinds["gate_proj"] == "column" and kinds["o_proj"] == kinds["down_proj"] == "row"
    assert kinds["q_norm"] == "skip" and "lm_head" not in kinds and "embed_tokens" not in kinds
    assert [spec["grad_allreduce"] for spec in specs if "q_norm" in spec["patterns"][0]] == [True]


@pytest.mark.parametrize(
    ("kind", "preset"),
    [("qwen2_moe", "qwen3_moe"), ("mixtral", "mixtral"), ("glm4_moe", "deepseek_v3"), ("olmoe", "qwen3_moe")],
)
def test_experts_are_known_by_their_kind(kind, preset):
    block = asked(kind, expert_parallel=2)["expert_parallel"]
    assert block["preset_model"] == preset and block["autoep_size"] == 2 and block["moe_layer_pattern"].startswith("lm\\.model")


@pytest.mark.parametrize(
    ("kind", "ways", "error"),
    [
        ("gpt2", {"tensor_parallel": 2}, "trainer.tensor_parallel=2: transformers has no plan for the layers of gpt2; use 1"),
        ("phi3", {"tensor_parallel": 2}, "trainer.tensor_parallel=2: transformers cuts phi3 as colwise_gather_output, rowwise_split_input"),
        ("qwen3", {"tensor_parallel": 4}, "trainer.tensor_parallel=4: qwen3 has 2 attention heads, 2 of keys and values; both must divide"),
        (
            "mixtral",
            {"tensor_parallel": 2},
            "trainer.tensor_parallel=2: mixtral has experts, which are not cut as matrices",
        ),
        ("qwen3", {"expert_parallel": 2}, "trainer.expert_parallel=2: qwen3 has no experts; use 1"),
        ("gpt_oss", {"expert_parallel": 2}, "trainer.expert_parallel=2: DeepSpeed does not know the experts of gpt_oss; it knows mixtral"),
        ("mixtral", {"expert_parallel": 3}, "trainer.expert_parallel=3: mixtral has 4 experts, which do not divide by it"),
    ],
)
def test_a_model_that_has_no_such_parts_is_refused(kind, ways, error):
    with pytest.raises(ConfigError) as caught:
        asked(kind, **ways)
    assert str(caught.value).startswith(error)


def test_a_teacher_without_experts_has_none_spread():
    both = TrainerConfig(tensor_parallel=2, expert_parallel=2)
    assert parallel.fitting(built("qwen3").lm, both).expert_parallel == 1
    assert parallel.fitting(built("mixtral").lm, both) == both


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("lm.model.layers.3.mlp.experts.gate_up_proj", ("lm.model.layers.3.mlp.experts.w1", "lm.model.layers.3.mlp.experts.w3")),
        ("lm.model.layers.3.mlp.gate.weight", ("lm.model.layers.3.mlp.router.gate.weight",)),
        ("lm.model.layers.3.mlp.shared_expert.up_proj.weight", ("lm.model.layers.3.mlp.shared_experts.up_proj.weight",)),
        ("lm.model.layers.3.mlp.shared_expert_gate.weight", ("lm.model.layers.3.mlp.shared_experts_gate.weight",)),
        ("lm.model.layers.3.input_layernorm.weight", ("lm.model.layers.3.input_layernorm.weight",)),
    ],
)
def test_what_a_layer_of_experts_has_keeps_the_names_that_transformers_gives(name, there):
    assert parallel.places(name) == there


def test_a_model_that_computes_something_else_is_seen():
    whole = torch.randn(16, 8)
    assert parallel.difference(whole, whole + 1e-7) == 0
    assert parallel.difference(whole, whole * 1.01) == pytest.approx(0.01, rel=0.01)
    assert parallel.difference(whole, whole * float("nan")) != 0


def test_the_plan_counts_the_parts_that_a_rank_has():
    shape = memory.Shape.of(built("mixtral").lm)
    assert 0 < shape.experts < shape.parameters and shape.chosen == 2

    def held(ranks: int, sharded: bool, **ways: Any) -> float:
        config: Any = type("Config", (), {"trainer": TrainerConfig(**ways)})
        return memory.held(config, shape, ranks, sharded=sharded)

    rest = shape.parameters - shape.experts
    assert held(4, sharded=False) == shape.parameters and held(4, sharded=True) == shape.parameters / 4
    assert held(4, sharded=False, expert_parallel=2) == rest + shape.experts / 2
    assert held(4, sharded=True, expert_parallel=2) == shape.parameters / 4
    assert held(4, sharded=False, expert_parallel=4, tensor_parallel=2) == rest - shape.linear / 2 + shape.experts / 4


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_gather_to_the_end_where_the_first_cannot_write(tmp_path, rank):
    """Or the others would wait for it until their deadline."""
    lm, gathered = built("qwen3").lm, []

    def taken(_: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name in ("a", "b"):
            gathered.append(name)
            yield name, torch.zeros(1)

    (tmp_path / "file").touch()
    settings = ModelConfig.model_validate({"init": {"model_type": "qwen3"}, "tokenizer": "characters:0123456789s="})
    role: Any = SimpleNamespace(classifier=False)
    worker: Any = SimpleNamespace(
        source=settings, rank=rank, lm=lm, tokenizer=models.load_tokenizer(settings), role=role, parameters=list, _taken=taken, _lane=None
    )
    with pytest.raises(OSError) if rank == 0 else nullcontext():
        Worker.export(worker, tmp_path / "file/model")
    assert gathered == ["a", "b"]


def test_a_model_in_host_memory_computes_module_by_module(monkeypatch):
    """With a copy on the device of what computes, and back where it was. The device is played: a copy in memory besides."""
    settings = ModelConfig.model_validate({"init": {"model_type": "qwen3", **SMALL}, "tokenizer": "characters:0123456789s="})
    lm = models.load_lm(settings, 0, torch.device("cpu"))
    cpu, homes = torch.device("cpu"), {name: each.data_ptr() for name, each in lm.named_parameters()}
    expected, away = parallel.whole(lm, cpu), []
    monkeypatch.setattr(nn.Parameter, "device", torch.device("meta"), raising=False)
    to = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda each, *given, **ways: to(each, *given, **ways).clone())
    with parallel.gathered(lm, cpu):
        block = lm.model.layers[0]
        block.register_forward_hook(lambda *_: away.append({n for n, p in lm.named_parameters() if p.data_ptr() != homes[n]}))
        found = parallel.hidden(lambda batch: parallel.hidden_states(lm, batch), lm, cpu)
    assert torch.equal(found, expected)
    assert {name: each.data_ptr() for name, each in lm.named_parameters()} == homes
    [moved] = away
    assert moved and not any(".layers.1." in name for name in moved)


class Partial:
    """A loader that takes what it is given, as transformers' does, and says what was missing."""

    def __init__(self) -> None:
        self.given: list[set[str]] = []

    def __call__(self, model: Any, state: dict[str, torch.Tensor], _: Any) -> tuple[list[str], set[str]]:
        self.given.append(set(state))
        return [], set(model.state_dict()) - set(state)


def test_a_sharded_model_is_loaded_layer_by_layer():
    lm, load = built("mixtral").lm, Partial()
    names = [f"model.layers.{layer}.mlp.experts.{expert}.w1.weight" for layer in (0, 1, 10) for expert in (0, 3)]
    given = dict.fromkeys([*names, "lm_head.weight", "model.norm.weight"], torch.zeros(1))
    wrong, missing = loading._by_layer(load)(lm, given)
    assert wrong == [] and "lm_head.weight" not in missing and "model.embed_tokens.weight" in missing
    assert load.given == [{"lm_head.weight", "model.norm.weight"}, *({name for name in names if f".{n}.mlp" in name} for n in (0, 1, 10))]
