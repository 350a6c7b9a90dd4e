"""Records of experts: laid together over turns, packed with their tokens, and cut with them."""

import numpy as np
import pytest
import torch

from trainer.data.experts import experts_of
from trainer.data.packing import Sequence, pack
from trainer.episodes import Episode, Prompt, Turn
from trainer.ranks.sequence_parallel import SequenceParallel

NONE = 255
SHAPE = (2, 3)  # layers, experts of a token


def record(*numbers: int) -> np.ndarray:
    """A token's experts tell its number."""
    return np.broadcast_to(np.array(numbers, np.uint8)[:, None, None], (len(numbers), *SHAPE)).copy()


def told(experts: np.ndarray | None) -> list[int]:
    assert experts is not None and experts.shape[1:] == SHAPE
    return experts[:, 0, 0].tolist()


def turn(*ids: int, experts: np.ndarray | None = None) -> Turn:
    return Turn([*ids], [-0.1] * len(ids) if experts is not None else [], experts=experts)


def episode(prompt: list[int], *turns: Turn) -> Episode:
    return Episode(Prompt(0, prompt, {}), 0, [*turns])


def test_of_one_turn_all_tokens_that_the_engine_read_are_known():
    assert told(experts_of(episode([3, 4], turn(5, 6, 7, experts=record(0, 1, 2, 3))))) == [0, 1, 2, 3]


def test_of_several_turns_the_first_record_of_a_token_counts_and_later_ones_know_what_lies_between():
    whole = episode([3, 4], turn(5, 6, experts=record(0, 1, 2)), turn(7, 8), turn(9, 10, experts=record(10, 11, 12, 13, 14, 15, 16)))
    assert told(experts_of(whole)) == [0, 1, 2, 13, 14, 15, 16], "the last token of a turn was read by the next one alone"
    part = episode([3, 4], turn(5, 6, experts=record(0, 1, 2)), turn(7, 8), turn(9, 10, experts=record(13, 14, 15, 16)))
    assert told(experts_of(part)) == told(experts_of(whole)), "an engine may leave out what is known"


def test_tokens_without_a_record_have_none():
    assert experts_of(episode([3], turn(5, 6))) is None
    before = episode([3, 4], turn(5, 6, experts=record(2)))
    assert told(experts_of(before)) == [NONE, NONE, 2], "of which the engine did not tell"
    after = episode([3, 4], turn(5, 6, experts=record(0, 1, 2)), turn(7, 8, 9))
    assert told(experts_of(after)) == [0, 1, 2, NONE, NONE, NONE], "that no engine read"


def test_a_record_of_more_tokens_than_there_are_is_refused():
    with pytest.raises(ValueError, match="experts of 3 tokens, of which there are 2 before its last"):
        experts_of(episode([3], turn(5, 6, experts=record(0, 1, 2))))


SEQUENCES = [
    Sequence([3, 4], [5, 6, 7], experts=record(3, 4, 5, 6)),
    Sequence([8], [9, 10]),
    Sequence([11, 12, 13], [14], experts=record(11, 12, 13)),
]


@pytest.mark.parametrize("one_row", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_experts_lie_where_their_tokens_do_also_on_ranks_that_share_sequences(one_row, size):
    for whole in pack(SEQUENCES, 16, pad_id=0, one_row=one_row):
        parts = [whole]
        if size > 1:
            ranks = [object.__new__(SequenceParallel) for _ in range(size)]
            for index, rank in enumerate(ranks):
                rank.size, rank.index = size, index
            parts = [rank.part(whole) for rank in ranks]
        for part in parts:
            assert part.experts_RLMK is not None and part.experts_RLMK.shape == (*part.input_ids_RL.shape, *SHAPE)
            known = torch.isin(part.input_ids_RL, torch.tensor([3, 4, 5, 6, 11, 12, 13]))
            expected = torch.where(known, part.input_ids_RL, NONE).to(torch.uint8)
            assert torch.equal(part.experts_RLMK[..., 1, 2], expected)
        assert sum(int((part.experts_RLMK != NONE).sum()) for part in parts if part.experts_RLMK is not None) == 7 * 2 * 3


def test_without_any_record_a_micro_batch_has_none():
    (batch,) = pack([Sequence([3], [4, 5])], 8, pad_id=0)
    assert batch.experts_RLMK is None


def test_a_record_that_is_not_of_its_tokens_is_refused():
    with pytest.raises(ValueError, match=r"sequence 1: a record of experts \(3, 2, 3\) where tokens, layers .* are \(2, 2, 3\)"):
        pack([SEQUENCES[0], Sequence([3], [4, 5], experts=record(1, 2, 3))], 16, pad_id=0)
