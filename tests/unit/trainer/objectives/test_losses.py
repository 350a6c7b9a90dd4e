"""algorithm.loss: each by hand, in any packing, and as TRL computes it."""

from __future__ import annotations

import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from trainer.configs.algorithm import AlgorithmConfig
from trainer.data.packing import Sequence, attach, balance, pack, select
from trainer.episodes import Batch, Denominators
from trainer.objectives.aggregation import denominators, part
from trainer.objectives.policy import LOSSES, policy

T = torch.tensor


def settings(loss: str, **more: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"loss": loss, "importance_cap": None, **more})


def batch(counts: Denominators, **tokens_N: torch.Tensor) -> Batch:
    """A micro-batch of one answer for each entry of `counts`; an objective looks at nothing else of it."""
    sizes = [int(n) for n in counts.lengths_E]
    episode_N, none = torch.repeat_interleave(torch.arange(len(sizes)), T(sizes)), torch.zeros(0, dtype=torch.int64)
    return Batch(none, none, none, none, episode_N, none, tokens_N, packed=False, real_tokens=0, counts=counts)


def learn(algorithm: AlgorithmConfig, sizes: list[int], ratios: list[float], advantages: list[float], logp: float = -1.0):
    """Loss, gradient by log-probability and statistics of answers of so many tokens."""
    episode_N = torch.repeat_interleave(torch.arange(len(sizes)), T(sizes))
    logp_N = torch.full((len(ratios),), logp).requires_grad_()
    old_N = logp_N.detach() - T(ratios).log()
    given = {"mask": torch.ones(len(ratios)), "old": old_N, "rollout": old_N, "advantages": T(advantages)}
    loss, stats = policy(algorithm, batch(denominators(given["mask"], episode_N, len(sizes)), **given), (logp_N, torch.zeros(len(ratios))))
    loss.backward()
    assert logp_N.grad is not None
    return loss.item(), logp_N.grad, stats


def test_gspo_by_hand():
    # Answer 0: ratios 2 and 0.5, so exp(mean log-ratio) = 1: no clipping, though each token's own ratio is far outside. Advantage 1:
    # loss -1 at both tokens. Answer 1: ratio 4 at its only token, advantage 1: clipped at 1.3. Mean over 3 tokens: -(1 + 1 + 1.3) / 3.
    # Gradients: -1 * 1 / 3 at the tokens of answer 0, none where clipped.
    loss, grad, stats = learn(settings("gspo", clip_high=0.3), [2, 1], [2.0, 0.5, 4.0], [1.0, 1.0, 1.0])
    assert loss == pytest.approx(-1.1)
    torch.testing.assert_close(grad, T([-1 / 3, -1 / 3, 0.0]))
    assert stats["clipped"] == 1


def test_gspo_gives_each_answer_the_geometric_mean_of_its_ratios():
    # Ratios 4 and 1: exp((ln 4 + 0) / 2) = 2, advantage -1: the loss 2 is not clipped from above. Over 2 tokens: (2 + 2) / 2 = 2.
    loss, grad, _ = learn(settings("gspo"), [2], [4.0, 1.0], [-1.0, -1.0])
    assert loss == pytest.approx(2.0)
    torch.testing.assert_close(grad, T([1.0, 1.0]))


def test_tokens_of_an_answer_may_have_advantages_of_their_own_with_gspo():
    # GSPO-token: the ratio of both tokens is exp((ln 2 - ln 2) / 2) = 1; advantages 1 and -3: (-1 + 3) / 2, gradients -1/2 and 3/2.
    loss, grad, _ = learn(settings("gspo"), [2], [2.0, 0.5], [1.0, -3.0])
    assert loss == pytest.approx(1.0)
    torch.testing.assert_close(grad, T([-0.5, 1.5]))


def test_cispo_by_hand():
    # Weights min(r, 1.3): 1.3, 0.5, 1; times the log-probability -1 and the advantage: 1.3*2, 0.5*1, -1*1. Loss is minus that by -1:
    # (2.6 + 0.5 - 1) / 3 = 0.7. Gradients -w*A/3: -2.6/3, -0.5/3, 1/3: the first token is learned although its ratio is 4.
    loss, grad, stats = learn(settings("cispo", clip_high=0.3), [3], [4.0, 0.5, 1.0], [2.0, 1.0, -1.0])
    assert loss == pytest.approx(0.7)
    torch.testing.assert_close(grad, T([-2.6 / 3, -0.5 / 3, 1 / 3]))
    assert stats["clipped"] == 0


def test_sapo_by_hand():
    # Ratio 1, any tau: sigmoid(0) * 4 / tau = 2 / tau; tau 2 for A = 1: loss -1; tau 4 for A = -1: loss 0.5. Gradient: A * 1.
    # Ratio 1.5 with tau 2: sigmoid(1) = 0.7310586, * 4 / 2 = 1.4621172. Gradient: 4 * s * (1 - s) * r = 4 * 0.1966119 * 1.5 = 1.1796716.
    loss, grad, stats = learn(settings("sapo", tau_pos=2.0, tau_neg=4.0), [3], [1.0, 1.0, 1.5], [1.0, -1.0, 1.0])
    assert loss == pytest.approx((-1 + 0.5 - 1.4621172) / 3)
    torch.testing.assert_close(grad, T([-1.0, 1.0, -1.1796716]) / 3)
    assert stats["clipped"] == 0


def test_the_gate_of_sapo_is_half_open_far_from_the_old_policy():
    # Ratio 3, tau 1: s = sigmoid(2) = 0.8807971; 4 * s * (1 - s) * 3 = 4 * 0.1049936 * 3 = 1.2599230, where without a gate it were 3.
    _, grad, _ = learn(settings("sapo"), [1], [3.0], [1.0])
    assert grad.item() == pytest.approx(-1.2599230)


@pytest.mark.parametrize("loss", LOSSES)
def test_at_the_old_policy_every_loss_has_the_gradient_of_reinforce(loss):
    _, grad, _ = learn(settings(loss), [2, 1], [1.0, 1.0, 1.0], [2.0, 2.0, -1.0])
    torch.testing.assert_close(grad, T([-2.0, -2.0, 1.0]) / 3)


@pytest.mark.parametrize("loss", LOSSES)
def test_whatever_stands_at_tool_tokens_neither_loss_nor_gradient_notice(loss):
    nan, counts = float("nan"), denominators(T([1.0, 0.0, 0.0]), T([0, 0, 0]), 1)
    logp_N = T([-1.0, -2.0, -math.inf]).requires_grad_()
    given = {"mask": T([1.0, 0.0, 0.0]), "old": T([-1.0, nan, -math.inf]), "rollout": T([-1.0, nan, nan])}
    micro = batch(counts, advantages=T([1.0, nan, math.inf]), **given)
    micro.episode_N = T([0, 0, 0])
    value, _ = policy(settings(loss), micro, (logp_N, torch.zeros(3)))
    value.backward()
    assert value.item() == pytest.approx({"cispo": 1.0, "sapo": -2.0}.get(loss, -1.0))
    assert logp_N.grad is not None
    assert logp_N.grad.tolist() == [-1.0, 0.0, 0.0]


# --- the same whatever the packing --------------------------------------------------------------------------------------------

LENGTHS = [(3, 17), (2, 1), (1, 1), (5, 9), (4, 2), (1, 12), (6, 6), (2, 3)]
ANSWERS = torch.repeat_interleave(torch.arange(len(LENGTHS)), T([r for _, r in LENGTHS]))
COUNT = len(ANSWERS)


@pytest.fixture(scope="module")
def model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=32, max_position_embeddings=128, **shape)).float()  # type: ignore[arg-type]


def logp(model: Qwen2ForCausalLM, micro: Batch) -> torch.Tensor:
    out = model(input_ids=micro.input_ids_RL, position_ids=micro.position_ids_RL, use_cache=False)
    return torch.log_softmax(out.logits.flatten(0, 1)[micro.index_N], -1).gather(1, micro.target_N[:, None])[:, 0]


@pytest.fixture(scope="module")
def learnt(model: Qwen2ForCausalLM) -> tuple[list[Sequence], dict[str, torch.Tensor]]:
    """Answers, of which environments wrote a fifth, with log-probabilities of a policy and of an engine that are somewhat older."""
    draw = torch.Generator().manual_seed(1)

    def tokens(count: int) -> list[int]:
        return torch.randint(1, 32, (count,), generator=draw).tolist()

    items = [Sequence(tokens(p), tokens(r)) for p, r in LENGTHS]
    (whole,) = pack(items, 10_000, pad_id=0)
    now_N = torch.zeros(COUNT)
    with torch.no_grad():
        now_N[whole.flat_N] = logp(model, whole)
    old_N = now_N + 0.3 * torch.randn(COUNT, generator=draw)
    tokens_N = {
        "mask": (torch.rand(COUNT, generator=draw) < 0.8).float(),
        "old": old_N,
        "rollout": old_N + 0.3 * torch.randn(COUNT, generator=draw),
        "advantages": torch.randn(len(LENGTHS), generator=draw)[ANSWERS],
    }
    return items, tokens_N


def step(model, learnt, algorithm: AlgorithmConfig, ranks: int, budget: int, one_row: bool) -> tuple[float, list[torch.Tensor]]:
    """Loss and gradient of an optimizer step by so many ranks, added up."""
    items, tokens_N = learnt
    counts, lengths_E = denominators(tokens_N["mask"], ANSWERS, len(items), limit=20), T([r for _, r in LENGTHS])
    model.zero_grad()
    total = 0.0
    for mine in balance([item.length for item in items], ranks):
        micros = pack([items[i] for i in mine], budget, pad_id=0, one_row=one_row)
        where = select(lengths_E, mine)
        attach(micros, {name: values[where] for name, values in tokens_N.items()}, part(counts, mine))
        for micro in micros:
            loss, _ = policy(algorithm, micro, (logp(model, micro), torch.zeros(len(micro.index_N))))
            loss.backward()
            total += loss.item()
    return total, [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("corrected", [{}, {"importance_cap": 1.5, "importance_level": "sequence", "importance_mode": "mask"}])
@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize("loss", LOSSES)
def test_loss_and_gradient_do_not_depend_on_packing_micro_batches_or_ranks(model, learnt, loss, aggregation, corrected):
    algorithm = settings(loss, aggregation=aggregation, **corrected)
    wanted, gradient = step(model, learnt, algorithm, 1, 20, one_row=False)  # an answer or two at a time
    assert any(g.abs().max() > 1e-4 for g in gradient)
    for ranks, budget, one_row in [(1, 10_000, False), (1, 40, False), (1, 40, True), (2, 20, False), (2, 10_000, True), (3, 33, False)]:
        value, found = step(model, learnt, algorithm, ranks, budget, one_row)
        assert value == pytest.approx(wanted, abs=1e-5)
        for a, b in zip(found, gradient, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


# --- as TRL has it ------------------------------------------------------------------------------------------------------------


def trl_loss(logp_EL: torch.Tensor, inputs: dict[str, torch.Tensor], loss: str, level: str, **args: Any) -> torch.Tensor:
    """What the GRPOTrainer makes of these log-probabilities."""
    trainer = pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer
    zeros = torch.zeros_like(logp_EL)
    given = {"delta": None, "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05, "steps_per_generation": 1, **args}
    stub = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp_EL, zeros, None),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        args=SimpleNamespace(**given, use_bias_correction_kl=False),
        model=SimpleNamespace(training=True),
        loss_type=loss,
        importance_sampling_level=level,
        epsilon_low=0.2,
        epsilon_high=1.3 if loss == "cispo" else 0.3,  # there the cap itself
        beta=0.0,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        use_vllm="importance_sampling_ratio" in inputs,
        vllm_importance_sampling_correction=True,
        max_completion_length=20,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        use_adaptive_entropy=False,
        _metrics={"train": defaultdict(list)},
    )
    return trainer._compute_loss(stub, None, inputs)


CASES = {
    "clip as dapo": ("dapo", "token", {"aggregation": "token"}),
    "clip as grpo": ("grpo", "token", {"aggregation": "sequence"}),
    "clip as dr_grpo": ("dr_grpo", "token", {"aggregation": "constant"}),
    "gspo": ("grpo", "sequence", {"loss": "gspo", "aggregation": "sequence"}),
    "cispo": ("cispo", "token", {"loss": "cispo", "aggregation": "token"}),
    "sapo": ("sapo", "token", {"loss": "sapo", "aggregation": "sequence"}),
}


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_those_of_trl(case, corrected):
    loss, level, ours = CASES[case]
    draw, sizes = torch.Generator().manual_seed(2), [3, 7, 1, 20]
    longest = max(sizes)
    mask_EL = (torch.arange(longest) < T(sizes)[:, None]).float()
    logp_EL = -1 - torch.rand((4, longest), generator=draw)
    old_EL = logp_EL + 0.4 * torch.randn((4, longest), generator=draw)
    advantages_E, ratio_E = torch.randn(4, generator=draw), T([1.5, 0.5, 1.0, 2.0])  # of policy over engine, one for an answer
    nothing = torch.zeros((4, 1), dtype=torch.int64)
    inputs = {
        "prompt_ids": nothing,
        "prompt_mask": nothing,
        "completion_ids": torch.zeros((4, longest), dtype=torch.int64),
        "completion_mask": mask_EL,
        "advantages": advantages_E,
        "old_per_token_logps": old_EL,
        "num_items_in_batch": mask_EL.sum(),
    } | ({"importance_sampling_ratio": ratio_E[:, None]} if corrected else {})
    theirs_EL = logp_EL.clone().requires_grad_()
    theirs = trl_loss(theirs_EL, inputs, loss, level)
    theirs.backward()

    logp_N, there = logp_EL[mask_EL.bool()].requires_grad_(), mask_EL.bool()
    episode_N = torch.repeat_interleave(torch.arange(4), T(sizes))
    last_N = torch.zeros(sum(sizes)).index_fill_(0, T(sizes).cumsum(0) - 1, 1.0)
    rollout_N = old_EL[there] - last_N * ratio_E[episode_N].log()  # an answer's weight is the product over its tokens
    given = {"mask": torch.ones(sum(sizes)), "old": old_EL[there], "rollout": rollout_N, "advantages": advantages_E[episode_N]}
    counts = denominators(given["mask"], episode_N, 4, limit=20)
    weights = {"importance_cap": 9.0, "importance_level": "sequence"} if corrected else {"importance_cap": None}
    algorithm = AlgorithmConfig.model_validate({"clip_low": 0.2, "clip_high": 0.3, **ours, **weights})
    value, _ = policy(algorithm, batch(counts, **given), (logp_N, torch.zeros(sum(sizes))))
    value.backward()
    assert value.item() == pytest.approx(theirs.item(), abs=1e-6)
    assert logp_N.grad is not None and theirs_EL.grad is not None
    torch.testing.assert_close(logp_N.grad, theirs_EL.grad[there], atol=1e-6, rtol=1e-5)
