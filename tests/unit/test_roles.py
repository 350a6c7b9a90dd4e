import pytest

from trainer.configs.sections import OptimConfig
from trainer.online.roles import combine, minibatches
from trainer.ranks.engine import schedule


def test_one_minibatch_takes_all_episodes_in_order():
    assert minibatches(4, epochs=2, count=1, seed=0) == [[0, 1, 2, 3], [0, 1, 2, 3]]


def test_every_epoch_deals_each_episode_once():
    steps = minibatches(12, epochs=3, count=4, seed=7)
    assert len(steps) == 12
    for epoch in range(3):
        part = steps[epoch * 4 : epoch * 4 + 4]
        assert sorted(i for step in part for i in step) == list(range(12))
        assert {len(step) for step in part} == {3}
    assert steps[:4] != steps[4:8]
    assert minibatches(12, 3, 4, 7) == steps
    assert minibatches(12, 3, 4, 8) != steps


def test_sums_over_tokens_become_means_over_the_global_batch():
    parts = [
        {"loss": 0.25, "kl": 3.0, "grad_norm": 2.0, "lr": 0.1, "skipped": 0.0, "real_tokens": 90, "padded_tokens": 100},
        {"loss": 0.5, "kl": 1.0, "grad_norm": 2.0, "lr": 0.1, "skipped": 0.0, "real_tokens": 50, "padded_tokens": 100},
    ]
    assert combine(parts, tokens=8) == {"loss": 0.75, "kl": 0.5, "grad_norm": 2.0, "lr": 0.1, "skipped": 0.0, "packing": 0.7}


def test_learning_rates_warm_up_and_decay():
    cosine = schedule(OptimConfig(schedule="cosine", warmup_steps=2), 10)
    assert [cosine(0), cosine(1), cosine(2)] == [0.5, 1.0, 1.0]
    assert cosine(6) == pytest.approx(0.5)
    assert cosine(10) == pytest.approx(0.0)
    linear = schedule(OptimConfig(schedule="linear"), 4)
    assert [linear(i) for i in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert schedule(OptimConfig(), 4)(1000) == 1.0
    held = schedule(OptimConfig(schedule="linear", warmup_steps=2), 10, held=4)
    assert [held(i) for i in range(11)] == [0.0] * 4 + [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
