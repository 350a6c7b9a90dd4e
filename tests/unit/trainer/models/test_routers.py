"""Routers of families of models: what they choose is recorded, and taken again, with weights that are the router's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.families import FAMILIES, MIXTURES, exported
from transformers import AutoModelForCausalLM

from trainer.errors import ConfigError
from trainer.models import routers
from trainer.models.heads import backbone

IDS = torch.tensor([[3, 4, 5, 6, 7, 8, 9, 10, 11], [9, 8, 3, 3, 12, 13, 4, 5, 6]])
LATER = {  # families that no table of ours lists
    "qwen3_5_moe_text": {"layer_types": ["linear_attention", "full_attention"], "num_experts": 4, "num_experts_per_tok": 2},
    "minimax": {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["full_attention", "full_attention"]},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "dots1": {
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "glm4_moe_lite": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
}


def loaded(kind: str, folder: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(exported(kind, folder / kind), attn_implementation="eager")


def attached(lm: Any) -> routers.Routers:
    return routers.attach(lm, lambda: lm(input_ids=IDS, use_cache=False), IDS.numel())


@pytest.mark.parametrize("kind", [*MIXTURES, *LATER])
def test_a_pass_takes_the_experts_that_it_is_given_and_its_router_learns(tmp_path, monkeypatch, kind):
    monkeypatch.setitem(FAMILIES, kind, FAMILIES.get(kind) or LATER[kind])
    lm = loaded(kind, tmp_path)
    plain = lm(input_ids=IDS, use_cache=False).logits
    plain.logsumexp(-1).sum().backward()
    expected = {name: p.grad.clone() for name, p in lm.named_parameters() if p.grad is not None}
    found = attached(lm)
    with torch.no_grad(), found.taken() as taken:
        assert torch.equal(lm(input_ids=IDS, use_cache=False).logits, plain), "recording changes nothing"
        own_NMK = taken()
    assert own_NMK.shape == (IDS.numel(), len(found.layers), found.k) and own_NMK.dtype == torch.uint8
    lm.zero_grad()
    found.replay(own_NMK)
    again = lm(input_ids=IDS, use_cache=False).logits
    again.logsumexp(-1).sum().backward()
    torch.testing.assert_close(again, plain, atol=1e-5, rtol=1e-5)
    for name, gradient in expected.items():
        torch.testing.assert_close(lm.get_parameter(name).grad, gradient, atol=1e-4, rtol=1e-3, msg=name)
    assert [int(each) for each in found.counted()] == [own_NMK[..., 0].numel(), 0]
    lm.zero_grad()
    other_NMK = (own_NMK + 1) % found.experts
    found.replay(other_NMK)
    with found.taken() as taken:
        changed = lm(input_ids=IDS, use_cache=False).logits
    assert not torch.allclose(changed, plain, atol=1e-3)
    given, differ = map(int, found.counted())
    assert given == own_NMK[..., 0].numel() and given / 2 < differ <= given, "the second layer's inputs are others by now"
    changed.logsumexp(-1).sum().backward()
    gates = [name for name, p in lm.named_parameters() if p.grad is not None and p.grad.any() and p.shape[:1] == (found.experts,)]
    assert gates, "a router learns from the experts that were taken"


def mixtral(folder: Any) -> Any:
    return loaded("mixtral", folder)


def test_weights_of_given_experts_are_the_routers_scores_of_them(tmp_path):
    lm = mixtral(tmp_path)
    found = attached(lm)
    inputs: list[tuple[torch.Tensor, ...]] = []
    backbone(lm).layers[0].mlp.experts.register_forward_pre_hook(lambda _, given: inputs.append(given))
    given_NMK = torch.randint(0, 4, (IDS.numel(), 2, 1), dtype=torch.uint8)
    found.replay(torch.cat([given_NMK, (given_NMK + 1) % 4], -1))
    with torch.no_grad():
        lm(input_ids=IDS, use_cache=False)
    hidden_ND, index_NK, weights_NK = inputs[0]
    scores_NE = torch.softmax(hidden_ND @ backbone(lm).layers[0].mlp.gate.weight.T, -1)
    chosen_NK = scores_NE.gather(1, index_NK)
    assert torch.equal(index_NK, torch.cat([given_NMK[:, 0], (given_NMK[:, 0] + 1) % 4], -1).long())
    torch.testing.assert_close(weights_NK, chosen_NK / chosen_NK.sum(-1, keepdim=True))


def test_a_token_without_a_record_chooses_itself(tmp_path):
    lm = mixtral(tmp_path)
    found = attached(lm)
    with torch.no_grad(), found.taken() as taken:
        plain = lm(input_ids=IDS, use_cache=False).logits
        own_NMK = taken()
    found.replay(torch.full_like(own_NMK, found.none))
    with torch.no_grad():
        assert torch.equal(lm(input_ids=IDS, use_cache=False).logits, plain)
    assert [int(each) for each in found.counted()] == [0, 0]


def test_activations_that_are_computed_anew_take_the_same_experts(tmp_path):
    gradients = []
    for checkpointed in (False, True):
        lm = mixtral(tmp_path).train()
        if checkpointed:
            lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        found = attached(lm)
        torch.manual_seed(0)
        given_NM1 = torch.randint(0, 4, (IDS.numel(), 2, 1), dtype=torch.uint8)
        found.replay(torch.cat([given_NM1, (given_NM1 + 1) % 4], -1))
        lm(input_ids=IDS, use_cache=False).logits.logsumexp(-1).sum().backward()
        gradients.append(backbone(lm).layers[0].mlp.gate.weight.grad)
    assert torch.equal(*gradients) and gradients[0].any()


@pytest.mark.parametrize(
    ("kind", "setting", "said"), [("llama", "required", "llama has no experts; use off"), ("llama", "auto", ""), ("mixtral", "off", "")]
)
def test_a_model_without_experts_is_refused_where_they_are_required(tmp_path, kind, setting, said):
    lm = loaded(kind, tmp_path)
    given: Any = (lm, lambda: lm(input_ids=IDS), IDS.numel(), setting)
    if said:
        with pytest.raises(ConfigError, match=rf"^rollout\.router_replay=required: {said}$"):
            routers.tried(*given)
    else:
        found, why = routers.tried(*given)
        assert found is None and why


def test_a_router_that_does_not_choose_by_topk_is_named(tmp_path):
    lm = mixtral(tmp_path)
    for layer in backbone(lm).layers:
        layer.mlp.gate.forward = lambda x, of=layer.mlp.gate: _by_sorting(of, x)
    with pytest.raises(
        ConfigError, match=r"^rollout\.router_replay=required: mixtral: no router of it chooses experts by torch\.topk; use off$"
    ):
        routers.tried(lm, lambda: lm(input_ids=IDS), IDS.numel(), "required")
    assert routers.tried(lm, lambda: lm(input_ids=IDS), IDS.numel(), "auto") == (
        None,
        "mixtral: no router of it chooses experts by torch.topk",
    )


def _by_sorting(gate: Any, hidden_ND: torch.Tensor) -> tuple[torch.Tensor, ...]:
    scores_NE = torch.softmax(hidden_ND @ gate.weight.T, -1)
    ordered = scores_NE.sort(-1, descending=True)
    return scores_NE, ordered.values[:, :2], ordered.indices[:, :2]


def test_a_model_that_does_not_compute_with_what_its_router_chooses_is_refused(tmp_path):
    lm = mixtral(tmp_path)
    for layer in backbone(lm).layers:
        layer.mlp.experts.forward = lambda hidden, *_: hidden
    with pytest.raises(ValueError, match="given other experts than it chose, it computes the same"):
        attached(lm)
