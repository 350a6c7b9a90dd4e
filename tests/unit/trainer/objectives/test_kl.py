import math

import pytest
import torch

from trainer.objectives.kl import KlController, kl, kl_loss


def test_estimators_by_hand():
    logp_N, ref_N = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    assert kl(logp_N, ref_N, "k1").item() == pytest.approx(math.log(2))
    assert kl(logp_N, ref_N, "k2").item() == pytest.approx(math.log(2) ** 2 / 2)
    assert kl(logp_N, ref_N, "k3").item() == pytest.approx(0.5 - 1 + math.log(2))


def expectation(estimator: str, function) -> tuple[float, torch.Tensor]:
    """Value and expected gradient of the per-token loss over the tokens that the policy itself would draw."""
    logits_V = torch.tensor([0.3, -0.2, 0.9], requires_grad=True)
    ref_V = torch.log_softmax(torch.tensor([0.0, 0.5, 0.1]), -1)
    logp_V = torch.log_softmax(logits_V, -1)
    total = (logp_V.exp().detach() * function(logp_V, ref_V, estimator)).sum()
    total.backward()
    assert logits_V.grad is not None
    return total.item(), logits_V.grad


def exact() -> tuple[float, torch.Tensor]:
    logits_V = torch.tensor([0.3, -0.2, 0.9], requires_grad=True)
    logp_V, ref_V = torch.log_softmax(logits_V, -1), torch.log_softmax(torch.tensor([0.0, 0.5, 0.1]), -1)
    total = (logp_V.exp() * (logp_V - ref_V)).sum()
    total.backward()
    assert logits_V.grad is not None
    return total.item(), logits_V.grad


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_have_the_kl_as_expectation(estimator: str):
    assert expectation(estimator, kl)[0] == pytest.approx(exact()[0], abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_loss_has_the_gradient_of_the_kl_whatever_is_reported(estimator: str):
    value, gradient_V = expectation(estimator, kl_loss)
    torch.testing.assert_close(gradient_V, exact()[1])
    assert value == pytest.approx(expectation(estimator, kl)[0])


def test_k1_differentiated_token_by_token_would_teach_nothing():
    torch.testing.assert_close(expectation("k1", kl)[1], torch.zeros(3), atol=1e-6, rtol=0)


def test_k3_stays_finite_for_policies_far_apart():
    assert torch.isfinite(kl(torch.tensor([-500.0]), torch.tensor([-0.1]), "k3")).all()


def test_an_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match="k4"):
        kl(torch.zeros(1), torch.zeros(1), "k4")  # type: ignore[arg-type]


def test_the_adaptive_coefficient_moves_towards_its_target():
    controller = KlController(0.1, target=6.0, horizon=100)
    controller.update(6.6, episodes=50)  # error 0.1 over half a horizon
    assert controller.coef == pytest.approx(0.1 * 1.05)
    controller.update(0.0, episodes=100)  # error -1, clipped to -0.2
    assert controller.coef == pytest.approx(0.1 * 1.05 * 0.8)
    controller.update(600.0, episodes=100)  # error 99, clipped to 0.2
    assert controller.coef == pytest.approx(0.1 * 1.05 * 0.8 * 1.2)
    again = KlController(0.1, target=6.0, horizon=100)
    again.load(controller.state())
    assert again.coef == controller.coef


def test_a_fixed_coefficient_stays():
    controller = KlController(0.1)
    controller.update(100.0, episodes=1000)
    assert controller.coef == 0.1
