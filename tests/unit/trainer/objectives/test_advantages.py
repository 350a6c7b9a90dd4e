import pytest
import torch

from trainer.configs.algorithm import AlgorithmConfig
from trainer.objectives.advantages import (
    ADVANTAGES,
    estimate,
    gae,
    group_relative,
    leave_one_out,
    reinforce_plus_plus,
    token_rewards,
    whiten,
)

T = torch.tensor


def test_dr_grpo_subtracts_the_group_mean():
    advantages_E = group_relative(T([1.0, 0.0, 0.0, 1.0]), T([0, 0, 0, 0]), normalize=False)
    assert advantages_E.tolist() == [0.5, -0.5, -0.5, 0.5]


def test_grpo_divides_by_the_deviation_with_bessels_correction():
    # Group 0: mean 2, deviations -1 0 1, variance 2/2 = 1. Group 1: mean 2, deviations -2 2, variance 8/1.
    advantages_E = group_relative(T([1.0, 0.0, 2.0, 3.0, 4.0]), T([0, 1, 0, 0, 1]), normalize=True)
    deviation = 8**0.5 + 1e-4
    torch.testing.assert_close(advantages_E, T([-1 / 1.0001, -2 / deviation, 0.0, 1 / 1.0001, 2 / deviation]))


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("reward", [1.0, 0.35, 33.3, 1000.1, 12345.678, 1e6 + 0.3])
def test_a_group_of_equal_rewards_teaches_nothing(normalize: bool, reward: float):
    for size in (2, 4, 6, 7, 10, 12):
        rewards_E, group_E = T([reward] * size + [5.0]), T([0] * size + [1])
        assert not group_relative(rewards_E, group_E, normalize=normalize).any(), size
        assert not leave_one_out(rewards_E, group_E)[:size].any(), size


def test_rloo_compares_with_the_mean_of_the_others():
    # Others of 1 are (2 + 6)/2 = 4, of 2 (1 + 6)/2 = 3.5, of 6 (1 + 2)/2 = 1.5. The single one of group 1 has no baseline.
    advantages_E = leave_one_out(T([1.0, 2.0, 6.0, 7.0]), T([0, 0, 0, 1]))
    assert advantages_E.tolist() == [-3.0, -1.5, 4.5, 7.0]


def test_whiten_looks_at_masked_tokens_alone():
    white_N = whiten(T([1.0, 99.0, 3.0, float("nan")]), T([1.0, 0.0, 1.0, 0.0]))
    torch.testing.assert_close(white_N, T([-1.0, 0.0, 1.0, 0.0]))


def test_the_score_stands_at_the_last_written_token_and_kl_at_each():
    # The first episode ends with a tool's token, the third was written by tools alone.
    rewards_N = token_rewards(
        T([10.0, 20.0, 30.0]), T([1.0, 2.0, float("nan"), 4.0, 5.0]), T([1.0, 1.0, 0.0, 1.0, 0.0]), T([3, 1, 1]), coef=0.5
    )
    assert rewards_N.tolist() == [-0.5, 9.0, 0.0, 18.0, 0.0]


def test_gae_by_hand():
    # t=2: 1 - 0.4 = 0.6. t=1: 0 + 0.5*0.4 - 0.2 + 0.25*0.6 = 0.15. t=0: 0.5*0.2 - 0.1 + 0.25*0.15 = 0.0375. Second episode: 2 - 1.
    advantages_N, returns_N = gae(T([0.0, 0.0, 1.0, 2.0]), T([0.1, 0.2, 0.4, 1.0]), torch.ones(4), T([3, 1]), gamma=0.5, lam=0.5)
    torch.testing.assert_close(advantages_N, T([0.0375, 0.15, 0.6, 1.0]))
    torch.testing.assert_close(returns_N, T([0.1375, 0.35, 1.0, 2.0]))


def test_gae_passes_over_tool_tokens_as_if_they_were_not_there():
    torch.manual_seed(0)
    rewards_N, values_N = torch.randn(5), torch.randn(5)
    expected, returns = gae(rewards_N, values_N, torch.ones(5), T([2, 3]), gamma=0.9, lam=0.8)
    written = T([1, 2, 5, 7, 8])  # of 10 tokens; the others are a tool's, with values that must not matter
    mask_N = torch.zeros(10).index_fill_(0, written, 1.0)
    rewards_N, values_N = (torch.full((10,), 77.0).index_copy_(0, written, x_N) for x_N in (rewards_N, values_N))
    advantages_N, returns_N = gae(rewards_N, values_N, mask_N, T([4, 6]), gamma=0.9, lam=0.8)
    torch.testing.assert_close(advantages_N[written], expected)
    torch.testing.assert_close(returns_N[written], returns)
    assert advantages_N[mask_N == 0].abs().sum() == returns_N[mask_N == 0].abs().sum() == 0


def test_lambda_one_is_the_return_less_the_value():
    advantages_N, returns_N = gae(T([1.0, 2.0, 3.0]), T([5.0, 6.0, 7.0]), torch.ones(3), T([3]), gamma=1.0, lam=1.0)
    assert advantages_N.tolist() == [1.0, -1.0, -4.0]
    assert returns_N.tolist() == [6.0, 5.0, 3.0]


def test_reinforce_plus_plus_whitens_returns_over_the_global_batch():
    # Single answers: no baseline. Returns to go with KL 1 and coef 1: episode 0 (score 4): 2, 3; episode 1 (score 0): -1.
    advantages_N = reinforce_plus_plus(T([4.0, 0.0]), T([0, 1]), torch.ones(3), torch.ones(3), T([2, 1]), kl_coef=1.0, gamma=1.0)
    torch.testing.assert_close(advantages_N, whiten(T([2.0, 3.0, -1.0]), torch.ones(3)))
    # Two answers of one group: the mean 2 goes first.
    advantages_N = reinforce_plus_plus(T([4.0, 0.0]), T([0, 0]), None, torch.ones(3), T([2, 1]), kl_coef=0.0, gamma=1.0)
    torch.testing.assert_close(advantages_N, whiten(T([2.0, 2.0, -2.0]), torch.ones(3)))


def test_reinforce_plus_plus_without_a_baseline_compares_with_the_global_batch_alone():
    rewards, groups, ones, lengths = T([4.0, 0.0, 1.0, 1.0]), T([0, 0, 1, 1]), torch.ones(4), T([1, 1, 1, 1])
    found = reinforce_plus_plus(rewards, groups, None, ones, lengths, kl_coef=0.0, gamma=1.0, baseline=False)
    torch.testing.assert_close(found, (rewards - 1.5) / rewards.std(unbiased=False))
    of_groups = reinforce_plus_plus(rewards, groups, None, ones, lengths, kl_coef=0.0, gamma=1.0)
    assert of_groups[2:].abs().max() < 1e-6 < found[2:].abs().min()


def test_every_algorithm_of_the_configuration_has_an_estimator():
    assert set(ADVANTAGES) == set(AlgorithmConfig.model_fields["name"].annotation.__args__)  # type: ignore[union-attr]


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_estimate_does_not_depend_on_the_order_of_episodes(name: str):
    torch.manual_seed(0)
    algorithm = AlgorithmConfig(name=name)  # type: ignore[arg-type]
    lengths = [3, 1, 4, 2]
    rewards_E, baselines_E, group_E = torch.randn(4), torch.randn(4), T([0, 1, 0, 1])
    values, kls = [torch.randn(n) for n in lengths], [torch.randn(n).abs() for n in lengths]

    def run(order: list[int]) -> list[torch.Tensor]:
        lengths_E = T([lengths[i] for i in order])
        values_N, kl_N = torch.cat([values[i] for i in order]), torch.cat([kls[i] for i in order])
        given = (rewards_E[order], group_E[order], lengths_E, torch.ones(10), values_N, kl_N, 0.1, baselines_E[order])
        advantages_N, _ = estimate(algorithm, *given)
        return list(advantages_N.split(lengths_E.tolist()))

    straight, turned = run([0, 1, 2, 3]), run([2, 0, 3, 1])
    for position, i in enumerate([2, 0, 3, 1]):
        torch.testing.assert_close(turned[position], straight[i])


def test_kl_in_the_reward_lowers_an_answers_score_by_its_sum():
    kl_N = T([0.5, 0.5, 1.0, 9.0])
    algorithm = AlgorithmConfig(name="dr_grpo")
    advantages_N, returns_N = estimate(algorithm, T([1.0, 3.0]), T([0, 0]), T([2, 2]), T([1.0, 1.0, 1.0, 0.0]), kl_N=kl_N, kl_coef=1.0)
    # Scores 1 - 1 = 0 and 3 - 1 = 2 (the tool's token has no part): mean 1.
    assert advantages_N.tolist() == [-1.0, -1.0, 1.0, 0.0]
    assert returns_N is None


def test_remax_compares_with_the_greedy_answer():
    # Rewards 1 and 0.25 against greedy ones of 0.5 and 0.75: 0.5 for both tokens of the first, -0.5 for the one that the second wrote.
    algorithm, baselines_E = AlgorithmConfig(name="remax", group_size=1), T([0.5, 0.75])
    given = (algorithm, T([1.0, 0.25]), T([0, 1]), T([2, 2]), T([1.0, 1.0, 1.0, 0.0]))
    assert estimate(*given, baselines_E=baselines_E)[0].tolist() == [0.5, 0.5, -0.5, 0.0]
    # With a KL of 1 in each token and a coefficient of 0.125: scores 1 - 0.25 and 0.25 - 0.125.
    advantages_N, _ = estimate(*given, kl_N=torch.ones(4), kl_coef=0.125, baselines_E=baselines_E)
    assert advantages_N.tolist() == [0.25, 0.25, -0.625, 0.0]


def test_remax_without_baselines_is_refused():
    with pytest.raises(ValueError, match="greedy"):
        estimate(AlgorithmConfig(name="remax"), T([1.0]), T([0]), T([1]), torch.ones(1))


def test_ppo_without_values_is_refused():
    with pytest.raises(ValueError, match="critic"):
        estimate(AlgorithmConfig(name="ppo"), T([1.0]), T([0]), T([1]), torch.ones(1))
