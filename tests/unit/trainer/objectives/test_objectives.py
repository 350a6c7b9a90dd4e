import math
from typing import Any

import pytest
import torch

from trainer.configs.algorithm import AlgorithmConfig, LossConfig
from trainer.episodes import Batch, Denominators
from trainer.objectives.aggregation import aggregate, denominators, part
from trainer.objectives.policy import policy, policy_loss
from trainer.objectives.supervised import supervised
from trainer.objectives.value import value, value_loss

T = torch.tensor
CLIP: Any = {"clip_low": 0.2, "clip_high": 0.3}


def clip_loss(
    logp_N: torch.Tensor, old_N: torch.Tensor, advantages_N: torch.Tensor, mask_N: torch.Tensor, **settings: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Of one answer with all these tokens."""
    counts = denominators(torch.ones_like(mask_N), torch.zeros(len(mask_N), dtype=torch.int64), 1)
    given = batch(counts, mask=mask_N, advantages=advantages_N)
    return policy_loss(AlgorithmConfig.model_validate(settings), given, logp_N, old_N)


def ratio(*values: float) -> torch.Tensor:
    return T([math.log(v) for v in values])


@pytest.mark.parametrize(
    ("r", "advantage", "loss", "clipped"),
    [
        (1.0, 2.0, -2.0, False),
        (1.5, 2.0, -2.6, True),  # gains end at 1 + clip_high
        (0.5, 2.0, -1.0, False),  # losing ground with a good token is never clipped
        (0.5, -2.0, 1.6, True),  # gains end at 1 - clip_low
        (1.5, -2.0, 3.0, False),
    ],
)
def test_the_clipped_objective_by_hand(r: float, advantage: float, loss: float, clipped: bool):
    logp_N = ratio(r).requires_grad_()
    loss_N, stats = clip_loss(logp_N, torch.zeros(1), T([advantage]), torch.ones(1), **CLIP)
    assert loss_N.item() == pytest.approx(loss)
    assert stats["clipped"] == float(clipped)
    loss_N.sum().backward()
    assert logp_N.grad is not None
    assert (logp_N.grad == 0).item() is clipped


def test_dual_clip_bounds_the_loss_of_bad_tokens():
    logp_N = ratio(10.0, 10.0, 2.0).requires_grad_()
    loss_N, stats = clip_loss(logp_N, torch.zeros(3), T([-1.0, 1.0, -1.0]), torch.ones(3), dual_clip=3.0, **CLIP)
    torch.testing.assert_close(loss_N, T([3.0, -1.3, 2.0]))
    assert stats["clipped"] == 2


def test_statistics_are_sums_over_learnt_tokens():
    _, stats = clip_loss(ratio(2.0, 1.0, 50.0), torch.zeros(3), T([1.0, 1.0, 1.0]), T([1.0, 1.0, 0.0]), **CLIP)
    assert stats["tokens"] == 2
    assert stats["ratio"] == pytest.approx(3.0)
    assert stats["clipped"] == 1
    assert stats["kl_old"] == pytest.approx(2 - 1 - math.log(2))


def test_whatever_stands_at_tool_tokens_neither_loss_nor_gradient_notice():
    logp_N = T([-1.0, -2.0, -3.0]).requires_grad_()
    mask_N, episode_N = T([1.0, 0.0, 0.0]), T([0, 0, 0])
    loss_N, _ = clip_loss(logp_N, T([-1.0, float("nan"), -math.inf]), T([1.0, float("nan"), math.inf]), mask_N, **CLIP)
    loss = aggregate(loss_N, mask_N, episode_N, "token", denominators(mask_N, episode_N, 1))
    loss.backward()
    assert loss.item() == -1.0
    assert logp_N.grad is not None
    assert logp_N.grad.tolist() == [-1.0, 0.0, 0.0]


def test_a_ratio_beyond_float32_gives_a_finite_loss():
    loss_N, _ = clip_loss(T([0.0]), T([-1000.0]), T([-1.0]), torch.ones(1), **CLIP)
    assert torch.isfinite(loss_N).all()


def test_value_loss_by_hand():
    # Free: (2 - 1)^2 = 1; kept within 0.2 of the old 0: (0.2 - 1)^2 = 0.64; the worse counts, half of it. Then the other way round.
    assert value_loss(T([2.0]), T([0.0]), T([1.0]), 0.2).item() == pytest.approx(0.5)
    assert value_loss(T([1.0]), T([0.0]), T([1.0]), 0.2).item() == pytest.approx(0.32)
    assert value_loss(T([1.0]), T([0.0]), T([3.0]), None).item() == pytest.approx(2.0)


def test_aggregate_by_hand():
    loss_N, mask_N, episode_N = T([1.0, 2.0, 9.0, 6.0]), T([1.0, 1.0, 0.0, 1.0]), T([0, 0, 0, 1])
    counts = denominators(mask_N, episode_N, 3)  # the third has no token and counts for nothing
    assert aggregate(loss_N, mask_N, episode_N, "token", counts).item() == pytest.approx((1 + 2 + 6) / 3)
    assert aggregate(loss_N, mask_N, episode_N, "sequence", counts).item() == pytest.approx((1.5 + 6) / 2)
    limited = denominators(mask_N, episode_N, 3, limit=5)
    assert aggregate(loss_N, mask_N, episode_N, "constant", limited).item() == pytest.approx((1 + 2 + 6) / (2 * 5))


@pytest.mark.parametrize("mode", ["token", "sequence", "constant"])
def test_shares_of_any_split_add_up_to_the_whole(mode):
    torch.manual_seed(0)
    loss_N, mask_N, episode_N = torch.randn(50), (torch.rand(50) < 0.7).float(), torch.randint(0, 6, (50,)).sort().values
    counts = denominators(mask_N, episode_N, 6, limit=7)
    whole = aggregate(loss_N, mask_N, episode_N, mode, counts)
    for sizes in ([50], [1] * 50, [20, 0, 30], [7, 11, 13, 19]):
        shares = [
            aggregate(*split, mode, counts) for split in zip(loss_N.split(sizes), mask_N.split(sizes), episode_N.split(sizes), strict=True)
        ]
        torch.testing.assert_close(torch.stack(shares).sum(), whole)


@pytest.mark.parametrize("mode", ["token", "sequence", "constant"])
def test_ranks_that_number_their_own_sequences_add_up_too(mode):
    loss_N, mask_N, episode_N = T([1.0, 2.0, 3.0, 4.0]), torch.ones(4), T([0, 1, 1, 2])
    counts = denominators(mask_N, episode_N, 3, limit=7)
    first = aggregate(loss_N[[0, 3]], torch.ones(2), T([0, 1]), mode, part(counts, [0, 2]))
    second = aggregate(loss_N[[1, 2]], torch.ones(2), T([0, 0]), mode, part(counts, [1]))
    torch.testing.assert_close(first + second, aggregate(loss_N, mask_N, episode_N, mode, counts))


def test_an_empty_part_has_a_loss_of_zero_with_a_gradient():
    logp_N = torch.randn(3, requires_grad=True)
    none_N = torch.zeros(0)
    counts = denominators(torch.ones(3), torch.zeros(3, dtype=torch.int64), 1)
    loss = aggregate(-logp_N[:0], none_N, none_N.long(), "sequence", counts)
    loss.backward()
    assert loss.item() == 0
    assert logp_N.grad is not None
    assert logp_N.grad.abs().sum() == 0


# --- objectives: what a rank learns, put together of the losses above --------------------------------------------------------


def batch(counts: Denominators, numbers: dict[str, float] | None = None, **tokens_N: torch.Tensor) -> Batch:
    """A micro-batch of one sequence for each entry of `counts`; an objective looks at nothing else of it."""
    episode_N = torch.repeat_interleave(torch.arange(len(counts.lengths_E)), counts.lengths_E.long())
    none = torch.zeros(0, dtype=torch.int64)
    return Batch(none, none, none, none, episode_N, none, tokens_N, packed=False, real_tokens=0, counts=counts, numbers=numbers or {})


TWO_TOKENS = denominators(torch.ones(2), torch.zeros(2, dtype=torch.int64), 1)
LOGP, ENTROPY = T([-1.0, -2.0]), T([0.5, 1.5])


def learn(algorithm: dict[str, Any], kl_coef: float = 0.0, **tokens_N: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    given = {"mask": torch.ones(2), "rollout": LOGP, "advantages": torch.zeros(2), **tokens_N}
    return policy(AlgorithmConfig.model_validate(algorithm), batch(TWO_TOKENS, {"kl_coef": kl_coef}, **given), (LOGP, ENTROPY))


def test_entropy_is_rewarded_by_its_coefficient():
    assert learn({})[0] == 0
    loss, stats = learn({"entropy_coef": 0.1})
    assert loss == pytest.approx(-0.1 * (0.5 + 1.5) / 2), "more entropy, less loss"
    assert stats["entropy"] == 2.0


@pytest.mark.parametrize(
    ("estimator", "of_2_tokens"),
    [("k1", 0.5 - 1.0), ("k2", (0.25 + 1.0) / 2), ("k3", (math.exp(-0.5) + 0.5 - 1) + (math.exp(1.0) - 1.0 - 1))],
)
def test_the_kl_from_the_reference_is_added_to_the_loss_by_its_coefficient(estimator, of_2_tokens):
    reference_N = LOGP - T([0.5, -1.0])
    kind = {"kl": {"coef": 1, "estimator": estimator}}
    loss, stats = learn(kind, kl_coef=0.2, reference=reference_N)
    assert loss.item() == pytest.approx(0.2 * of_2_tokens / 2)
    assert stats["kl"].item() == pytest.approx(of_2_tokens)
    kind["kl"]["where"] = "reward"
    assert learn(kind, kl_coef=0.2, reference=reference_N)[0] == 0, "where it is part of the reward, it is none of the loss"


def test_the_kl_in_the_loss_pulls_towards_the_reference():
    logp_N = LOGP.clone().requires_grad_()
    given = {"mask": torch.ones(2), "rollout": LOGP, "advantages": torch.zeros(2), "reference": LOGP - T([0.5, -1.0])}
    algorithm = AlgorithmConfig.model_validate({"kl": {"coef": 1}})
    policy(algorithm, batch(TWO_TOKENS, {"kl_coef": 0.2}, **given), (logp_N, ENTROPY))[0].backward()
    assert logp_N.grad is not None
    torch.testing.assert_close(logp_N.grad, 0.2 * T([0.5, -1.0]) / 2)  # descent lowers what lies above the reference


def test_the_policy_takes_old_log_probabilities_where_it_was_asked_before():
    before_N = LOGP - T([math.log(2.0), 0.0])
    loss, stats = learn({"clip_high": 0.3}, advantages=T([1.0, 1.0]), old=before_N, rollout=before_N)
    assert loss.item() == pytest.approx(-(1.3 + 1.0) / 2)
    assert stats["clipped"] == 1
    loss, stats = learn({}, advantages=T([1.0, 1.0]))
    assert (loss, stats["clipped"]) == (-1.0, 0), "without them this update is the first, and the ratio 1"


def test_the_importance_weight_of_the_policy_is_capped_and_its_difference_reported():
    loss, stats = learn({"importance_cap": 2.0}, advantages=T([1.0, 1.0]), rollout=LOGP - T([math.log(8.0), 0.0]))
    assert loss.item() == pytest.approx(-(2.0 + 1.0) / 2)
    assert stats["logprob_diff"].item() == pytest.approx(math.log(8.0))
    assert learn({"importance_cap": None}, advantages=T([1.0, 1.0]), rollout=LOGP - 1)[0] == -1.0


def test_sequences_weigh_alike_where_the_settings_say_so():
    counts = denominators(torch.ones(4), T([0, 0, 0, 1]), 2)
    given = batch(counts, mask=torch.ones(4))
    output = T([-3.0, -3.0, -3.0, -1.0]), torch.zeros(4)
    assert supervised(LossConfig(), given, output)[0] == 10 / 4
    assert supervised(LossConfig(aggregation="sequence"), given, output)[0] == (3.0 + 1.0) / 2


def test_supervised_learns_the_tokens_of_the_mask_by_cross_entropy():
    counts = denominators(T([1.0, 0.0]), T([0, 0]), 1)
    loss, stats = supervised(LossConfig(), batch(counts, mask=T([1.0, 0.0])), (T([-1.5, -9.0]), torch.zeros(2)))
    assert (loss, stats) == (1.5, {})


def test_the_value_objective_clips_against_the_values_before_the_batch():
    given = batch(TWO_TOKENS, mask=torch.ones(2), values=T([0.0, 0.0]), returns=T([1.0, 1.0]))
    assert value(None, given, (T([1.0, 0.5]),))[0] == pytest.approx(0.5 * (0 + 0.25) / 2)
    assert value(0.2, given, (T([1.0, 0.5]),))[0].item() == pytest.approx(0.5 * (0.64 + 0.64) / 2)
