"""Ranks of the policy compute together what one computes alone, however unlike their shares are."""

from __future__ import annotations

from typing import Any

import pytest
from support.families import FAMILIES, NOT_PARTED, exported, logprobs, plain
from support.ranks import learn, scores, together

from trainer.cluster.actors import free_port


def values(steps: list[dict[str, float]], name: str) -> list[float]:
    return [step[name] for step in steps]


def close(steps: list[dict[str, float]], name: str) -> Any:
    return pytest.approx(values(steps, name), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_ranks_may_have_more_chunks_of_logits_than_others(tiny_model, stage):
    three_tokens = 3 * 15
    (alone,) = together(learn, 1, str(tiny_model), [[0, 1]], {}, three_tokens)
    both = together(learn, 2, str(tiny_model), [[0], [1]], {"trainer": {"zero_stage": stage, "timeout": 60}}, three_tokens)
    for each in both:
        assert values(each, "grad_norm") == close(alone, "grad_norm")


@pytest.mark.parametrize(
    ("size", "shares", "stage", "changes"),
    [
        pytest.param(2, [[0, 1]] * 2, 3, {}, id="two"),
        pytest.param(4, [[0, 1]] * 4, 2, {"model": {"gradient_checkpointing": True}}, id="more than heads of keys", marks=pytest.mark.slow),
        # a sequence per row, without a mask
        pytest.param(2, [[0, 1]] * 2, 0, {"trainer": {"micro_batch_tokens": 15}}, id="rows of one sequence", marks=pytest.mark.slow),
        pytest.param(2, [[0], [0], [1], [1]], 0, {}, id="two pairs"),
    ],
)
def test_ranks_that_share_sequences_compute_what_one_does(tiny_model, size, shares, stage, changes):
    trainer, ranks = {**changes.get("trainer", {}), "timeout": 60}, len(shares)
    (alone,) = together(learn, 1, str(tiny_model), [[0, 1]], {**changes, "trainer": trainer})
    shared = {**changes, "trainer": {**trainer, "zero_stage": stage, "sequence_parallel": size}, "placement": {"ranks": ranks}}
    everyone = together(learn, ranks, str(tiny_model), shares, shared)
    for name in ("loss", "entropy", "logprob_diff"):  # sums over a rank's sequences
        assert [sum(steps) for steps in zip(*(values(each, name) for each in everyone[::size]), strict=True)] == close(alone, name), name
    for each in everyone:
        assert values(each, "grad_norm") == close(alone, "grad_norm")


@pytest.mark.parametrize(
    "kinds", [pytest.param(["mistral", "gemma3_text", "gpt_oss"], id="some"), pytest.param([*FAMILIES], id="all", marks=pytest.mark.slow)]
)
def test_each_family_is_computed_by_ranks_that_share_sequences_or_refused(tmp_path, kinds):
    paths = {kind: str(exported(kind, tmp_path / kind)) for kind in kinds}
    for each in together(scores, 2, paths, [free_port() for _ in kinds], seconds=300):
        assert {kind for kind in kinds if isinstance(each[kind], str)} == NOT_PARTED & {*kinds}
        for kind in kinds:
            if isinstance(found := each[kind], str):
                assert found.startswith(f"trainer.sequence_parallel=2: {kind} has ") and found.endswith("; use 1")
            else:
                assert found.tolist() == pytest.approx(logprobs(plain(paths[kind])).tolist(), abs=1e-4), kind


def test_each_of_two_keeps_little_more_than_half_of_what_one_does(tiny_model):
    """Of activations, with sequences that are not cut for packing."""
    trainer = {"micro_batch_tokens": 128, "timeout": 60}
    (alone,) = together(learn, 1, str(tiny_model), [[1]], {"trainer": trainer}, None, 10)
    both = together(
        learn, 2, str(tiny_model), [[1]] * 2, {"trainer": {**trainer, "sequence_parallel": 2}, "placement": {"ranks": 2}}, None, 10
    )
    assert max(each[0]["kept"] for each in both) <= 0.6 * alone[0]["kept"]
    assert values(both[0], "grad_norm") == close(alone, "grad_norm")
