from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from support.configs import settings

from trainer.configs.sections import OptimConfig
from trainer.data.packing import Sequence
from trainer.episodes import Denominators, Episode, Prompt, Turn
from trainer.online.roles import RoleGroup, Rollout, combine, minibatches, roles_of
from trainer.ranks.engine import schedule
from trainer.ranks.worker import Tokens


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


def test_the_share_of_routers_that_would_have_chosen_others_is_over_all_ranks():
    same = {"loss": 0.0, "grad_norm": 2.0, "lr": 0.1, "skipped": 0.0, "real_tokens": 90, "padded_tokens": 100}
    assert combine([{**same, "routed": 30, "rerouted": 6}, {**same, "routed": 10, "rerouted": 4}], tokens=8)["rerouted"] == 0.25
    assert "rerouted" not in combine([same], tokens=8)


@pytest.mark.parametrize(("replay", "sent"), [("auto", True), ("off", False)])
def test_only_who_replays_is_sent_experts(replay, sent):
    record = np.zeros((3, 2, 2), np.uint8)
    episode = Episode(Prompt(0, [3, 4], {}), 0, [Turn([5, 6], [-1.0, -1.0], "stop", experts=record)])
    group = object.__new__(RoleGroup)
    group.role = cast(Any, SimpleNamespace(replay=replay))
    (sequence,) = group._sent(Rollout.of([episode]), [0])
    assert (sequence.experts is not None) == sent and [*sequence.response_ids] == [5, 6]


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


def test_each_minibatch_is_divided_by_its_own_tokens_and_sequences(tmp_path):
    """What each of two ranks is given; with one minibatch the counts are those of all episodes."""
    episodes = [Episode(Prompt(i, [1], {}), i, [Turn([2] * n, [0.0] * n, "stop")]) for i, n in enumerate((1, 2, 3, 4, 0, 6))]
    given: list[tuple[int, float, float]] = []

    def learn(sequences: list[Sequence], tokens_N: Tokens, counts: Denominators, *_: Any) -> dict[str, float]:
        given.append((len(tokens_N["mask"]), counts.tokens, counts.sequences))
        assert len(counts.lengths_E) == len(sequences)
        return dict.fromkeys(("loss", "grad_norm", "lr", "skipped", "real_tokens", "padded_tokens"), 0.0)

    for count in (1, 2):
        group = object.__new__(RoleGroup)
        group.config = settings(tmp_path, algorithm={"minibatches": count})
        group.role = roles_of(group.config)[0]
        group.packing = {"budget": 16384}
        group.launcher = cast(Any, SimpleNamespace(wait=lambda calls, *_: calls))  # which have ended: these ranks are in this process
        group.ranks = [SimpleNamespace(optimizer_step=SimpleNamespace(remote=learn))] * 2
        rollout = Rollout.of(episodes, compared=[1])
        given.clear()
        group.train(rollout, {"mask": rollout.flat.mask_N}, step=1)
        steps = minibatches(6, 1, count, 1)
        assert [numbers[1:] for numbers in given[::2]] == [numbers[1:] for numbers in given[1::2]], "both ranks divide alike"
        lengths = [1, 0, 3, 4, 0, 6]
        assert [numbers[1:] for numbers in given[::2]] == [
            (sum(lengths[i] for i in step), sum(lengths[i] > 0 for i in step)) for step in steps
        ]
        assert sum(tokens for tokens, *_ in given) == 16


def test_the_mask_is_0_where_an_episode_is_left_out_or_compared_alone():
    episodes = [Episode(Prompt(i, [1], {}), i, [Turn([2] * n, [0.0] * n, "stop")]) for i, n in enumerate((2, 1, 3))]
    rollout = Rollout.of(episodes, left_out=[0], compared=[1])
    assert (rollout.flat.mask_N.tolist(), rollout.kept) == ([0, 0, 0, 1, 1, 1], [1, 2])
