"""The cut of a micro-batch among ranks that share its sequences, without the ranks; tests/integration has them."""

from typing import Any

import pytest
import torch

from trainer.data.packing import Sequence, pack
from trainer.ranks.sequence_parallel import SequenceParallel, _mask

SEQUENCES = [Sequence([3, 4], [5, 6, 7]), Sequence([8], [9, 10]), Sequence([11, 12, 13], [14])]


def ranks(size: int) -> list[SequenceParallel]:
    made = []
    for index in range(size):
        rank = object.__new__(SequenceParallel)
        rank.size, rank.index = size, index
        made.append(rank)
    return made


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("one_row", [False, True])
def test_the_ranks_columns_side_by_side_are_the_micro_batch_and_each_target_is_of_one_rank(size, one_row):
    for whole in pack(SEQUENCES, 16, pad_id=0, one_row=one_row):
        own = ranks(size)
        parts = [rank.part(whole) for rank in own]
        columns = whole.input_ids_RL.size(1)
        assert torch.equal(torch.cat([part.input_ids_RL for part in parts], 1)[:, :columns], whole.input_ids_RL)
        assert torch.equal(torch.cat([part.position_ids_RL for part in parts], 1)[:, :columns], whole.position_ids_RL)
        assert len({part.input_ids_RL.shape for part in parts}) == 1
        assert torch.cat([rank.mine_N for rank in own]).sort()[0].tolist() == [*range(len(whole.index_N))]
        for rank, part in zip(own, parts, strict=True):
            assert torch.equal(part.target_N, whole.target_N[rank.mine_N])
            read = part.input_ids_RL.flatten()[part.index_N]
            assert torch.equal(read, whole.input_ids_RL.flatten()[whole.index_N[rank.mine_N]]), "what a target is predicted from"


def test_a_token_looks_at_those_before_it_in_its_own_sequence():
    (whole,) = pack(SEQUENCES, 16, pad_id=0, one_row=True)
    starts = (whole.position_ids_RL[0] == 0).nonzero()[:, 0].tolist()
    assert len(starts) == 3
    mask_LL = _mask(whole)[0, 0]
    for i in range(len(mask_LL)):
        first = max(start for start in starts if start <= i)
        assert mask_LL[i].nonzero()[:, 0].tolist() == [*range(first, i + 1)]


def test_a_window_ends_how_far_it_looks():
    (whole,) = pack(SEQUENCES, 16, pad_id=0, one_row=True)
    full_LL, near_LL = _mask(whole)[0, 0], _mask(whole, 2)[0, 0]
    for i, row in enumerate(full_LL):
        assert near_LL[i].nonzero()[:, 0].tolist() == [j for j in row.nonzero()[:, 0].tolist() if i - j < 2]


def test_attention_that_keeps_its_name_is_plain_where_nothing_is_parted():
    """flash_attention_2 is registered under its own name, so the look at the whole model comes through here as well."""
    (rank,) = ranks(1)
    rank.parts, given = False, [torch.rand(1, 2, 3, 4) for _ in range(3)]

    def core(_module: Any, query: Any, _key: Any, _value: Any, mask: Any, **more: Any) -> Any:
        return query, (mask, more)

    found = rank.attention(core, masked=False)(torch.nn.Identity(), *given, "mask", scaling=2.0)
    assert found == (given[0], ("mask", {"scaling": 2.0}))
