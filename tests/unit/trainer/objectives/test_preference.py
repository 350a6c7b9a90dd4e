"""Losses of preferences and of reward models, by hand and cut in several ways."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

from trainer.configs.preferences import PreferenceConfig, RmLossConfig
from trainer.data.packing import Sequence, attach, pack, split
from trainer.episodes import Batch
from trainer.objectives.aggregation import denominators, part
from trainer.objectives.pairwise import pairwise, preferred
from trainer.objectives.preference import preference
from trainer.ranks.reduction import means

T = torch.tensor


def log_sigmoid(x: float) -> float:
    return -math.log(1 + math.exp(-x))


def batch(lengths: list[int], numbers: dict[str, float] | None = None, **tokens_N: torch.Tensor) -> Batch:
    """A micro-batch of sequences with so many response tokens; an objective looks at nothing else of it."""
    episode_N = torch.repeat_interleave(torch.arange(len(lengths)), T(lengths, dtype=torch.int64))
    counts = denominators(torch.ones(sum(lengths)), episode_N, len(lengths))
    none = torch.zeros(0, dtype=torch.int64)
    tokens_N = {"mask": torch.ones(sum(lengths))} | tokens_N
    return Batch(none, none, none, none, episode_N, none, tokens_N, packed=False, real_tokens=0, counts=counts, numbers=numbers or {})


# A pair: the better answer has gained 0.5 + 0.5 = 1 on the reference in two tokens, the worse one -3 in one, so h is 4; of means 3.5.
LOGP = T([-1.0, -2.0, -4.0])
REFERENCE = T([-1.5, -2.5, -1.0])


def loss_of(kl: float = 0.0, **algorithm: Any) -> float:
    given = batch([2, 1], {"kl": kl}, **({} if algorithm.get("loss") == "simpo" else {"reference": REFERENCE}))
    return preference(PreferenceConfig.model_validate(algorithm), given, (LOGP, torch.zeros(3)))[0].item()


@pytest.mark.parametrize(
    ("algorithm", "loss"),
    [
        ({"beta": 0.5}, -log_sigmoid(0.5 * 4)),
        ({"beta": 0.5, "length_normalized": True}, -log_sigmoid(0.5 * 3.5)),
        ({"beta": 0.5, "label_smoothing": 0.1}, -0.9 * log_sigmoid(2) - 0.1 * log_sigmoid(-2)),
        ({"beta": 0.5, "loss": "robust", "label_smoothing": 0.1}, (-0.9 * log_sigmoid(2) + 0.1 * log_sigmoid(-2)) / 0.8),
        ({"beta": 0.5, "loss": "ipo"}, (4 - 1) ** 2),
        ({"beta": 0.5, "loss": "ipo", "length_normalized": True}, (3.5 - 1) ** 2),
        ({"beta": 2.0, "loss": "simpo", "gamma": 1.0}, -log_sigmoid(2 * (-1.5 + 4) - 1)),
        # Without a baseline 1 - sigmoid(0.5) and 1 - sigmoid(0.5 * 3); from a distance of 2: 1 - sigmoid(-0.5) and 1 - sigmoid(2.5).
        ({"beta": 0.5, "loss": "kto"}, (1 / (1 + math.exp(0.5)) + 1 / (1 + math.exp(1.5))) / 2),
        (
            {"beta": 0.5, "loss": "kto", "kl": 2.0, "desirable": 2.0, "undesirable": 3.0},
            (2 / (1 + math.exp(-0.5)) + 3 / (1 + math.exp(2.5))) / 2,
        ),
        ({"beta": 0.5, "sft_coef": 0.2}, -log_sigmoid(2) + 0.2 * 1.5),
    ],
)
def test_each_loss_by_hand(algorithm, loss):
    assert loss_of(**algorithm) == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "robust", "simpo", "kto"])
def test_every_loss_wants_the_better_answer_likelier_and_the_worse_one_less_likely(loss):
    logp_N = T([-2.0, -2.0, -2.0]).requires_grad_()
    algorithm = PreferenceConfig.model_validate({"loss": loss, "label_smoothing": 0.1 if loss == "robust" else 0.0})
    given = batch([2, 1], {"kl": 0.0}, **({} if loss == "simpo" else {"reference": T([-2.0, -2.0, -2.0])}))
    preference(algorithm, given, (logp_N, torch.zeros(3)))[0].backward()
    assert logp_N.grad is not None
    assert (logp_N.grad[:2] < 0).all() and logp_N.grad[2] > 0


def test_answers_with_labels_have_the_losses_that_they_have_in_pairs():
    """Good, bad, bad: gains of 1 and -3 as above, and of 2, from a distance of 0.5."""
    algorithm = PreferenceConfig(beta=0.5, loss="kto", desirable=2.0, undesirable=3.0)
    labels = T([1.0, 1.0, -1.0, -1.0])
    given = batch([2, 1, 1], {"kl": 0.5}, reference=torch.cat([REFERENCE, T([-3.0])]), label=labels)
    logp_N = torch.cat([LOGP, T([-1.0])]).requires_grad_()
    loss, stats = preference(algorithm, given, (logp_N, torch.zeros(4)))
    by_hand = [2 / (1 + math.exp(0.25)), 3 / (1 + math.exp(1.75)), 3 / (1 + math.exp(-0.75))]
    assert loss.item() == pytest.approx(sum(by_hand) / 3)
    assert stats["accuracy"].item() == 2 and stats["margin"].item() == pytest.approx(0.25 + 1.75 - 0.75)
    loss.backward()
    assert logp_N.grad is not None and (logp_N.grad.sign() == -labels).all()


def test_statistics_of_preferences_are_sums_over_pairs():
    algorithm = PreferenceConfig(beta=0.5)
    _, stats = preference(algorithm, batch([2, 1], reference=REFERENCE), (LOGP, torch.zeros(3)))
    assert {name: stats[name].item() for name in ("accuracy", "margin", "score_chosen", "score_rejected")} == {
        "accuracy": 1.0,
        "margin": 2.0,
        "score_chosen": 0.5,
        "score_rejected": -1.5,
    }


def test_the_reward_models_loss_by_hand():
    given = batch([1, 1, 1, 1])
    scores = T([2.0, 0.5, -1.0, 1.0])
    loss, stats = pairwise(RmLossConfig(), given, (scores,))
    assert loss.item() == pytest.approx(-(log_sigmoid(1.5) + log_sigmoid(-2.0)) / 2)
    assert (stats["accuracy"], stats["margin"], stats["score_chosen"], stats["score_rejected"]) == (1, -0.5, 1, 1.5)
    loss, _ = pairwise(RmLossConfig(center=0.1), given, (scores,))
    assert loss.item() == pytest.approx((-log_sigmoid(1.5) - log_sigmoid(-2.0) + 0.1 * (2.5**2 + 0.0)) / 2)
    loss, _ = pairwise(RmLossConfig(), batch([1, 1, 1, 1], margin=T([1.0, 1.0, 0.0, 0.0])), (scores,))
    assert loss.item() == pytest.approx(-(log_sigmoid(0.5) + log_sigmoid(-2.0)) / 2)


def test_a_model_that_is_right_as_often_as_it_says_is_calibrated():
    sure = math.log(0.75 / 0.25)  # sigmoid is 0.75
    calibrated = means([{"loss": 0.0, **{k: float(v) for k, v in preferred(T([sure, sure, sure, -sure])).items()}}], 8, 4)
    assert calibrated["calibration"] == pytest.approx(0, abs=1e-6)
    assert calibrated["accuracy"] == 0.75
    never = means([{"loss": 0.0, **{k: float(v) for k, v in preferred(T([-sure, -sure])).items()}}], 4, 2)
    assert never["calibration"] == pytest.approx(0.75)


def test_a_part_without_pairs_has_a_loss_of_zero_with_a_gradient():
    """A rank that has run out of sequences runs as many micro-batches as the others."""
    logp_N = torch.zeros(0, requires_grad=True)
    whole = batch([1, 1], reference=torch.zeros(2)).counts
    empty = batch([], reference=torch.zeros(0))
    empty.counts = whole
    loss, stats = preference(PreferenceConfig(), empty, (logp_N, torch.zeros(0)))
    loss.backward()
    assert (loss.item(), stats["accuracy"].item()) == (0, 0)
    loss, _ = pairwise(RmLossConfig(), empty, (logp_N,))
    loss.backward()
    assert loss.item() == 0


PAIRS = [Sequence([1, 2, 3][: 1 + i % 3], list(range(3, 4 + i % 5))) for i in range(12)]
OBJECTIVES = {
    **{
        loss: partial(preference, PreferenceConfig.model_validate({"loss": loss} | ({"label_smoothing": 0.1} if loss == "robust" else {})))
        for loss in ("sigmoid", "ipo", "robust", "simpo", "kto")
    },
    "averaged": partial(preference, PreferenceConfig(length_normalized=True, sft_coef=0.3)),
}


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize(("budget", "ranks", "one_row"), [(1000, 1, False), (14, 1, False), (40, 1, True), (14, 2, False), (14, 3, True)])
def test_loss_and_gradient_do_not_depend_on_micro_batches_packing_and_ranks(name, budget, ranks, one_row):
    """Log-probabilities are a table by position in the batch, so that each token's gradient can be looked at."""
    torch.manual_seed(0)
    lengths_E = T([len(s.response_ids) for s in PAIRS])
    flat_N = int(lengths_E.sum())
    table_N, reference_N = torch.randn(flat_N).requires_grad_(), torch.randn(flat_N)
    starts_E = lengths_E.cumsum(0) - lengths_E
    episode_N = torch.repeat_interleave(torch.arange(len(PAIRS)), lengths_E)
    counts = denominators(torch.ones(flat_N), episode_N, len(PAIRS))
    shares, count = split([s.length for s in PAIRS], ranks, budget, one_row=one_row, together=2)
    total = torch.zeros(())
    for mine in shares:
        where_N = torch.cat([torch.arange(int(starts_E[i]), int(starts_E[i] + lengths_E[i])) for i in mine])
        batches = pack([PAIRS[i] for i in mine], budget, pad_id=0, one_row=one_row, count=count, together=2)
        given = {"mask": torch.ones(len(where_N))} | ({} if name == "simpo" else {"reference": reference_N[where_N]})
        attach(batches, given, part(counts, mine), {"kl": 0.3})
        for each in batches:
            logp_N = table_N[where_N][each.flat_N]
            total = total + OBJECTIVES[name](each, (logp_N, torch.zeros_like(logp_N)))[0]
    total.backward()
    plain_N = table_N.detach().clone().requires_grad_()
    whole = batch(lengths_E.tolist(), {"kl": 0.3}, **({} if name == "simpo" else {"reference": reference_N}))
    expected = OBJECTIVES[name](whole, (plain_N, torch.zeros(flat_N)))[0]
    expected.backward()
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(table_N.grad, plain_N.grad)
