"""Which experts tokens took in a rollout engine, as `Turn` has them: laid together for an episode, and end to end for a batch.

A record is [tokens, layers with experts, experts of a token], in uint8 or int16, whose largest number says that none is known.
"""

from __future__ import annotations

import numpy as np

from trainer.episodes import Episode


def experts_of(episode: Episode) -> np.ndarray | None:
    """Those that an episode's input tokens took [tokens, layers, experts of a token], laid together from the records of its turns.

    Of a token that several turns tell of, as each reads all before it, the first counts: its log-probability is of that.
    Raises ValueError for a record of more tokens than there are.
    """
    end, known, parts = len(episode.prompt.token_ids), 0, []
    for turn in episode.turns:
        end += len(turn.token_ids)
        if turn.experts is None or not turn.token_ids:
            continue
        begin = end - 1 - len(turn.experts)
        if begin < 0:
            raise ValueError(f"a turn has the experts of {len(turn.experts)} tokens, of which there are {end - 1} before its last one")
        parts += [unknown(turn.experts, begin - known), turn.experts[max(known - begin, 0) :]]
        known = end - 1
    if not parts:
        return None
    return np.concatenate([*parts, unknown(parts[0], end - 1 - known)])


def unknown(like: np.ndarray, count: int) -> np.ndarray:
    """A record of tokens whose experts are not known."""
    return np.full((max(count, 0), *like.shape[1:]), np.iinfo(like.dtype).max, like.dtype)


def end_to_end(records: list[tuple[np.ndarray | None, int]]) -> np.ndarray | None:
    """Those of sequences of so many input tokens each; None where nothing is known of any.

    Raises ValueError where one is not of its tokens, or of other layers than the others.
    """
    like = next((record for record, _ in records if record is not None), None)
    if like is None:
        return None
    each = [unknown(like, length) if record is None else record for record, length in records]
    for i, (record, (_, length)) in enumerate(zip(each, records, strict=True)):
        if record.shape != (length, *like.shape[1:]):
            expected = (length, *like.shape[1:])
            raise ValueError(f"sequence {i}: a record of experts {record.shape} where tokens, layers and experts of a token are {expected}")
    return np.concatenate(each)
