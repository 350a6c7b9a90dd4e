import math
from typing import Any

import torch

from trainer.objectives.importance_sampling import importance_weight

T = torch.tensor


def test_the_weight_is_the_ratio_up_to_the_cap():
    weight_N, stats = importance_weight(T([-1.0, -1.0, -1.0]), T([-1.0, -1.5, -9.0]), 2.0)
    torch.testing.assert_close(weight_N, T([1.0, math.exp(0.5), 2.0]))
    assert {name: value.item() for name, value in stats.items()} == {
        "logprob_diff": 8.5,
        "logprob_diff_max": 8.0,
        "capped": 1,
        "dropped": 0,
        "tokens": 3,
    }


def test_a_non_finite_log_probability_drops_the_token():
    weight_N, stats = importance_weight(T([-1.0, -1.0, -1.0, -1.0]), T([float("nan"), -math.inf, math.inf, -1.0]), 2.0)
    assert weight_N.tolist() == [0.0, 0.0, 0.0, 1.0]
    assert stats["dropped"] == 3
    assert stats["logprob_diff"] == 0


def test_without_a_cap_nothing_is_corrected_but_dropping_remains():
    weight_N, stats = importance_weight(T([-1.0, -1.0]), T([-3.0, float("nan")]), None)
    assert weight_N.tolist() == [1.0, 0.0]
    assert (stats["logprob_diff"], stats["capped"]) == (2.0, 0.0)


def test_a_ratio_beyond_float32_is_capped():
    assert importance_weight(T([0.0]), T([-1000.0]), 2.0)[0].item() == 2.0


def test_statistics_leave_out_tool_tokens():
    _, stats = importance_weight(T([-1.0, -1.0]), T([-2.0, float("nan")]), 2.0, T([1.0, 0.0]))
    assert (stats["tokens"], stats["logprob_diff"], stats["dropped"]) == (1, 1.0, 0)


def test_the_weight_has_no_gradient_and_an_empty_part_is_fine():
    old_N = torch.zeros(2, requires_grad=True)
    assert not importance_weight(old_N, torch.zeros(2), 2.0)[0].requires_grad
    assert importance_weight(torch.zeros(0), torch.zeros(0), 2.0)[1]["logprob_diff_max"] == 0


def test_masked_weights_outside_the_bounds_do_not_count():
    # Weights 1, e^0.5 = 1.65, e^8, e^-2 = 0.14, with 0.5 to 2 allowed: the last two are dropped.
    old_N, rollout_N = T([-1.0, -1.0, -1.0, -3.0]), T([-1.0, -1.5, -9.0, -1.0])
    weight_N, stats = importance_weight(old_N, rollout_N, 2.0, mode="mask", low=0.5)
    torch.testing.assert_close(weight_N, T([1.0, math.exp(0.5), 0.0, 0.0]))
    assert (stats["dropped"], stats["capped"], stats["logprob_diff"]) == (2, 0, 10.5)
    torch.testing.assert_close(importance_weight(old_N, rollout_N, 2.0, mode="mask")[0], T([1.0, math.exp(0.5), 0.0, math.exp(-2)]))


def test_an_answers_weight_is_the_product_over_what_the_policy_wrote():
    # Answer 0: differences 0.5 and -0.25, and 9 at a tool's token: e^0.25. Answer 1: 1 and 1: e^2, capped at 4 or masked.
    old_N, rollout_N = torch.zeros(5), T([-0.5, 0.25, -9.0, -1.0, -1.0])
    given: Any = {"mask_N": T([1.0, 1.0, 0.0, 1.0, 1.0]), "episode_N": T([0, 0, 0, 1, 1])}
    weight_N, stats = importance_weight(old_N, rollout_N, 4.0, **given)
    torch.testing.assert_close(weight_N, T([math.exp(0.25)] * 3 + [4.0, 4.0]))
    assert (stats["capped"], stats["logprob_diff"]) == (2, 2.75)
    weight_N, stats = importance_weight(old_N, rollout_N, 4.0, **given, mode="mask")
    torch.testing.assert_close(weight_N, T([math.exp(0.25)] * 3 + [0.0, 0.0]))
    assert stats["dropped"] == 2


def test_a_token_without_a_log_probability_leaves_its_answer_the_others_weight():
    weight_N, _ = importance_weight(torch.zeros(2), T([-0.5, float("nan")]), 4.0, episode_N=T([0, 0]))
    torch.testing.assert_close(weight_N, T([math.exp(0.5), 0.0]))
    assert len(importance_weight(torch.zeros(0), torch.zeros(0), 2.0, episode_N=torch.zeros(0, dtype=torch.int64))[0]) == 0
