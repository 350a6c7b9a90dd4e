import math

import torch

from trainer.algorithms.importance_sampling import importance_weight

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
