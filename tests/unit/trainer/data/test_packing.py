import random

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from trainer.data.packing import Sequence, attach, balance, efficiency, flatten, pack, plan, scatter, select, split
from trainer.episodes import Batch, Episode, Prompt, Turn
from trainer.errors import ConfigError
from trainer.objectives.aggregation import aggregate, denominators, part

PAD = 0


def sequences(lengths: list[tuple[int, int]], seed: int = 0) -> list[Sequence]:
    rng = random.Random(seed)
    return [Sequence([rng.randrange(1, 32) for _ in range(p)], [rng.randrange(1, 32) for _ in range(r)]) for p, r in lengths]


def long_tailed(count: int, longest: int, seed: int = 0) -> list[int]:
    """Lengths whose mean is about a fifth of the longest."""
    lengths = np.random.default_rng(seed).lognormal(np.log(longest / 5) - 0.5, 1.0, count)
    return np.clip(lengths, 2, longest).astype(int).tolist()


@pytest.fixture(scope="module")
def model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    model = Qwen2ForCausalLM(config).float()
    assert model.config._attn_implementation == "sdpa"
    return model


def logp(model: Qwen2ForCausalLM, batch: Batch) -> torch.Tensor:
    out = model(input_ids=batch.input_ids_RL, position_ids=batch.position_ids_RL, use_cache=False)
    return torch.log_softmax(out.logits.flatten(0, 1)[batch.index_N], -1).gather(1, batch.target_N[:, None])[:, 0]


def one_by_one(model: Qwen2ForCausalLM, items: list[Sequence]) -> torch.Tensor:
    """The plainest computation there is: each sequence alone, no padding, no packing."""
    parts = []
    for item in items:
        ids = torch.tensor([[*item.prompt_ids, *item.response_ids]])
        logits = model(input_ids=ids, use_cache=False).logits[0, len(item.prompt_ids) - 1 : -1]
        parts.append(torch.log_softmax(logits, -1).gather(1, torch.tensor(item.response_ids)[:, None])[:, 0])
    return torch.cat(parts)


MIX = [(3, 17), (2, 1), (1, 1), (5, 9), (4, 2), (1, 12), (6, 6), (2, 3), (3, 1), (1, 30)]


def test_a_micro_batch_by_hand():
    items = [
        Sequence([1, 2], [3, 4, 5], {"advantages": [0.1, 0.2, 0.3]}),
        Sequence([6], [7, 8, 9, 10], {"advantages": [1.0, 2.0, 3.0, 4.0]}),
    ]
    (batch,) = pack(items, 8, pad_id=PAD)
    assert batch.input_ids_RL.tolist() == [[1, 2, 3, 4], [6, 7, 8, 9]]  # the last token is predicted, not fed
    assert batch.position_ids_RL.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert batch.index_N.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert batch.target_N.tolist() == [3, 4, 5, 7, 8, 9, 10]
    assert batch.episode_N.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert batch.flat_N.tolist() == [0, 1, 2, 3, 4, 5, 6]
    torch.testing.assert_close(batch.tokens_N["advantages"], torch.tensor([0.1, 0.2, 0.3, 1.0, 2.0, 3.0, 4.0]))
    assert not batch.packed
    assert batch.real_tokens == 8


def test_several_sequences_in_a_row_restart_their_positions_and_so_does_padding():
    items = [Sequence([1, 2], [9]), Sequence([3, 4, 5, 6], [9, 9]), Sequence([7], [9])]
    (batch,) = pack(items, 10, pad_id=PAD)
    assert batch.packed
    assert batch.input_ids_RL.tolist() == [[3, 4, 5, 6, 9], [1, 2, 7, 0, 0]]
    assert batch.position_ids_RL.tolist() == [[0, 1, 2, 3, 4], [0, 1, 0, 0, 1]]
    assert batch.flat_N.tolist() == [1, 2, 0, 3]


@pytest.mark.parametrize("one_row", [False, True])
@pytest.mark.parametrize("budget", [33, 64, 500])
def test_log_probabilities_equal_those_of_each_sequence_alone(model: Qwen2ForCausalLM, budget: int, one_row: bool):
    items = sequences(MIX)
    batches = pack(items, budget, pad_id=PAD, one_row=one_row)
    assert any(b.packed for b in batches)
    with torch.no_grad():
        torch.testing.assert_close(scatter([logp(model, b) for b in batches], batches), one_by_one(model, items), atol=1e-5, rtol=0)


def test_packed_rows_of_several_sequences_are_really_tested_above():
    batches = pack(sequences(MIX), 64, pad_id=PAD)
    assert any(b.packed and len(b.input_ids_RL) > 1 for b in batches)


def test_what_stands_in_padding_and_in_neighbours_does_not_matter(model: Qwen2ForCausalLM):
    items = [Sequence([1, 2], [9]), Sequence([3, 4, 5, 6], [9, 9]), Sequence([7], [9])]
    (batch,) = pack(items, 10, pad_id=PAD)
    (other,) = pack([Sequence([8, 8], [9]), items[1], items[2]], 10, pad_id=31)
    with torch.no_grad():
        before, after = logp(model, batch), logp(model, other)
    assert torch.equal(before[batch.episode_N != 0], after[other.episode_N != 0])


def gradients(
    model: Qwen2ForCausalLM, items: list[Sequence], mask: torch.Tensor, mode, ranks: int, budget: int
) -> tuple[float, list[torch.Tensor]]:
    """Loss and gradient of one optimizer step, by as many simulated ranks, each with its own sequences and micro-batches."""
    lengths_E = torch.tensor([len(s.response_ids) for s in items])
    counts = denominators(mask, torch.repeat_interleave(torch.arange(len(items)), lengths_E), len(items))
    model.zero_grad()
    total = 0.0
    shares = balance([s.length for s in items], ranks)
    passes = max(len(plan([items[i].length for i in mine], budget)) for mine in shares)
    for mine in shares:
        batches = pack([items[i] for i in mine], budget, pad_id=PAD, count=passes)
        assert len(batches) == passes
        attach(batches, {"mask": mask[select(lengths_E, mine)]})
        for batch in batches:
            loss = aggregate(-logp(model, batch), batch.tokens_N["mask"], batch.episode_N, mode, part(counts, mine))
            loss.backward()
            total += loss.item()
    return total, [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("mode", ["token", "sequence"])
@pytest.mark.parametrize(("ranks", "budget"), [(1, 33), (1, 64), (1, 500), (2, 33), (2, 500), (3, 40)])
def test_loss_and_gradient_do_not_depend_on_packing_micro_batches_or_ranks(model: Qwen2ForCausalLM, mode, ranks: int, budget: int):
    items = sequences(MIX)
    count = sum(r for _, r in MIX)
    mask = (torch.rand(count, generator=torch.Generator().manual_seed(1)) < 0.8).float()
    lengths = torch.tensor([r for _, r in MIX])
    episode_N = torch.repeat_interleave(torch.arange(len(MIX)), lengths)
    model.zero_grad()
    expected = aggregate(-one_by_one(model, items), mask, episode_N, mode, denominators(mask, episode_N, len(items)))
    expected.backward()
    wanted = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    loss, found = gradients(model, items, mask, mode, ranks, budget)
    assert loss == pytest.approx(expected.item(), abs=1e-5)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("budget", [40, 100, 1000])
@pytest.mark.parametrize("one_row", [False, True])
def test_every_token_is_in_exactly_one_micro_batch_within_the_budget(budget: int, one_row: bool):
    rng = random.Random(budget)
    items = sequences([(rng.randrange(1, 10), rng.randrange(0, 30)) for _ in range(200)])
    batches = pack(items, budget, pad_id=PAD, one_row=one_row)
    assert all(b.input_ids_RL.numel() <= budget for b in batches)
    assert not one_row or all(len(b.input_ids_RL) == 1 for b in batches)
    flat = torch.cat([b.flat_N for b in batches])
    assert flat.sort().values.tolist() == list(range(sum(len(s.response_ids) for s in items)))
    targets = torch.cat([b.target_N for b in batches])
    assert torch.empty_like(targets).index_copy_(0, flat, targets).tolist() == [t for s in items for t in s.response_ids]
    assert sum(b.real_tokens for b in batches) == sum(s.length for s in items)


@pytest.mark.parametrize("longest", [256, 1024])
@pytest.mark.parametrize("times", [1, 2, 4, 16])
@pytest.mark.parametrize("seed", range(3))
def test_a_long_tailed_mix_wastes_less_than_a_twentieth(longest: int, times: int, seed: int):
    lengths = long_tailed(512, longest, seed)
    assert 0.15 < np.mean(lengths) / max(lengths) < 0.25
    items = [Sequence([1], [2] * n) for n in lengths]
    assert efficiency(pack(items, longest * times, pad_id=PAD)) >= 0.95


def test_equal_short_sequences_lie_one_to_a_row():
    batches = pack(sequences([(10, 8)] * 100), 17 * 30, pad_id=PAD)
    assert [b.packed for b in batches] == [False] * 4
    assert efficiency(batches) == 1.0


def test_nearly_equal_sequences_are_not_packed_either():
    batches = pack(sequences([(10, 7 + i % 2) for i in range(100)]), 10_000, pad_id=PAD)
    assert [b.packed for b in batches] == [False]


def test_a_plan_can_be_asked_for_more_passes_than_it_needs():
    lengths = [4, 4, 4]
    assert plan(lengths, 12) == [[[0], [1], [2]]]
    assert plan(lengths, 12, count=2) == [[[0]], [[1], [2]]]
    assert plan(lengths, 12, count=5) == [[[0]], [[1]], [[2]], [], []]
    assert plan([], 12, count=2) == [[], []]


def test_an_empty_micro_batch_teaches_nothing_but_runs(model: Qwen2ForCausalLM):
    (batch,) = pack([], 12, pad_id=PAD, count=1)
    logp_N = logp(model, batch)
    assert logp_N.shape == (0,)
    logp_N.sum().backward()
    assert batch.real_tokens == 0


def test_a_sequence_beyond_the_budget_is_refused_with_both_numbers():
    with pytest.raises(ConfigError, match=r"trainer\.micro_batch_tokens: 40; a sequence has 50 tokens"):
        pack(sequences([(21, 30)]), 40, pad_id=PAD)


def test_a_sequence_without_a_prompt_is_refused():
    with pytest.raises(ValueError, match="sequence 1 has no prompt"):
        pack([Sequence([1], [2]), Sequence([], [2])], 40, pad_id=PAD)


def test_per_token_values_of_the_wrong_length_are_refused():
    with pytest.raises(ValueError, match=r"sequence 1: 'mask' has 1 values for 2 response tokens"):
        pack([Sequence([1], [2], {"mask": [1.0]}), Sequence([1], [2, 3], {"mask": [1.0]})], 40, pad_id=PAD)


def test_balance_splits_by_hand():
    # Pairs by difference 8-7, 6-5, 4-2; then {4, 7} against {2, 8}, then the sums 16 and 16 of {4, 7, 5} and {2, 8, 6}.
    assert sorted(balance([8, 7, 6, 5, 4, 2], 2)) == [[0, 2, 5], [1, 3, 4]]
    assert balance([], 2) == [[], []]
    assert sorted(balance([5], 2)) == [[], [0]]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [7, 64, 509])
def test_balance_is_even_in_count_and_tokens(ranks: int, count: int):
    lengths = long_tailed(count, 1024)
    shares = balance(lengths, ranks)
    assert sorted(i for share in shares for i in share) == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    tokens = [sum(lengths[i] for i in share) for share in shares]
    if count >= 8 * ranks:
        assert max(tokens) / (sum(tokens) / ranks) < 1.05


def episode(*turns: Turn) -> Episode:
    return Episode(Prompt(0, [1], {}), 0, list(turns))


def test_flatten_lays_episodes_end_to_end():
    flat = flatten([episode(Turn([5, 6], [-0.5, -0.25])), episode(), episode(Turn([7], [-1.0]))])
    assert flat.lengths_E.tolist() == [2, 0, 1]
    assert flat.episode_N.tolist() == [0, 0, 2]
    assert flat.mask_N.tolist() == [1.0, 1.0, 1.0]
    assert flat.rollout_N.tolist() == [-0.5, -0.25, -1.0]
    assert (flat.mask_N.dtype, flat.rollout_N.dtype) == (torch.float32, torch.float32)
    assert select(flat.lengths_E, [2, 0]).tolist() == [2, 0, 1]


def test_flatten_masks_what_an_environment_wrote():
    conversation = episode(Turn([5, 6], [-0.5, -0.25], "stop"), Turn([7, 8, 9]), Turn([5], [-1.0], "length"))
    flat = flatten([conversation, episode(Turn([4], [-2.0]))])
    assert flat.lengths_E.tolist() == [6, 1]
    assert flat.mask_N.tolist() == [1, 1, 0, 0, 0, 1, 1]
    assert flat.rollout_N.tolist() == [-0.5, -0.25, 0, 0, 0, -1.0, -2.0]
    assert conversation.response_ids == [5, 6, 7, 8, 9, 5]
    assert conversation.mask == flat.mask_N[:6].tolist()
    assert conversation.logprobs == flat.rollout_N[:6].tolist()


def test_an_episode_is_finished_if_its_last_sampled_turn_is():
    assert episode(Turn([5], [-1.0], "length"), Turn([7]), Turn([5], [-1.0], "stop"), Turn([7])).finished
    assert not episode(Turn([5], [-1.0], "stop"), Turn([7]), Turn([5], [-1.0], "length")).finished


def test_flatten_refuses_log_probabilities_that_do_not_match():
    with pytest.raises(ValueError, match="episode 1 has a turn of 2 tokens and 1 log-probabilities"):
        flatten([episode(Turn([5], [-1.0])), episode(Turn([5, 6], [-1.0]))])


def test_all_ranks_run_as_many_passes_as_the_one_that_needs_most():
    shares, count = split([4, 1, 1, 1], ranks=2, budget=4)
    assert sorted(map(len, shares)) == [2, 2]
    assert count == 2, "the rank with the sequence of four tokens needs two, the other one"


def test_a_sequence_that_fills_a_row_exactly_is_put_there():
    assert plan([3, 1], 4, one_row=True) == [[[0, 1]]]


@pytest.mark.parametrize("together", [1, 2])
def test_sequences_that_must_be_alone_have_a_row_each_beside_others_about_as_long(together):
    lengths = [9, 2, 3, 8, 2, 2, 5, 4]
    rows = plan(lengths, 20, alone=True, together=together)
    assert all(len(row) == 1 for batch in rows for row in batch)
    assert sorted(row[0] for batch in rows for row in batch) == list(range(8))
    assert all(len(batch) * max(lengths[row[0]] for row in batch) <= 20 for batch in rows)
    assert all({i ^ 1 for [i] in batch} == {i for [i] in batch} for batch in rows) or together == 1, "pairs are not parted"
    assert [sorted(i for [i] in batch) for batch in rows] == (
        [[0, 3], [1, 2, 6, 7], [4, 5]] if together == 1 else [[0, 1], [2, 3], [4, 5, 6, 7]]
    )
    more = plan(lengths, 20, alone=True, together=together, count=5)
    assert len(more) == 5 and sorted(row[0] for batch in more for row in batch) == list(range(8))


def test_pairs_stay_together_where_a_micro_batch_is_halved():
    assert plan([4] * 6, 24, alone=True, together=2, count=2) == [[[0], [1]], [[2], [3], [4], [5]]]


def test_pairs_whose_rows_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match=r"trainer\.micro_batch_tokens: 15; 2 rows of 9 tokens must fit into a micro-batch, 18 in all"):
        plan([9, 2], 15, alone=True, together=2)
