"""Sequences into micro-batches under a token budget, and the split of a batch over ranks.

Axes: N response tokens, R rows and L columns of a micro-batch. A row holds one sequence or several, end to end; position ids restart
with each, which is how transformers (`masking_utils.find_packed_sequence_indices`) learns where attention must stop. It looks only if it
is given neither an attention mask nor a key-value cache: call the model with `use_cache=False` and without `attention_mask`.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch

from trainer.data.experts import end_to_end, unknown
from trainer.episodes import Batch, Denominators, Episode
from trainer.errors import ConfigError

# Lengths of rows that are tried, in units of the longest sequence. Attention computes whole rows, so short ones are cheaper.
WIDTHS = (1.0, 1.5, 2.0, 3.0, 4.0)
# Share of real tokens with which no longer row is tried. One sequence per row needs no mask, which is worth some padding.
ENOUGH, ENOUGH_UNPACKED = 0.96, 0.9

Rows = list[list[int]]  # which sequences lie in each row of a micro-batch


@dataclass(slots=True)
class Sequence:
    """What is fed and what is learnt: the response, token by token, given the prompt."""

    prompt_ids: Items[int]
    response_ids: Items[int]
    tokens: Mapping[str, Items[float] | np.ndarray] = field(default_factory=dict)  # per response token: mask, advantages, ...
    experts: np.ndarray | None = None  # per input token: those that it takes, as in `Turn`; None where that is not known
    pictures: tuple[Any, ...] = ()  # as in `Prompt`, of the prompt and of what follows

    @property
    def length(self) -> int:
        """Input tokens: the last response token is predicted but never fed, since nothing is learnt after it."""
        return len(self.prompt_ids) + max(len(self.response_ids) - 1, 0)


@dataclass(frozen=True)
class Flat:
    """The response tokens of all episodes laid end to end."""

    lengths_E: torch.Tensor  # int64
    episode_N: torch.Tensor  # int64
    mask_N: torch.Tensor  # float32, 1 where the policy wrote the token
    rollout_N: torch.Tensor  # float32, the rollout engine's log-probabilities


def flatten(episodes: list[Episode]) -> Flat:
    """Lay episodes end to end. Raises ValueError where a turn's log-probabilities are not one per token."""
    turns = [(i, turn) for i, episode in enumerate(episodes) for turn in episode.turns]
    for i, turn in turns:
        if turn.sampled and len(turn.logprobs) != len(turn.token_ids):
            raise ValueError(f"episode {i} has a turn of {len(turn.token_ids)} tokens and {len(turn.logprobs)} log-probabilities")
    lengths_E = torch.tensor([sum(len(turn.token_ids) for turn in e.turns) for e in episodes], dtype=torch.int64)
    lengths_T = torch.tensor([len(turn.token_ids) for _, turn in turns], dtype=torch.int64)
    only_sampled = all(turn.sampled for _, turn in turns)
    rollout = chain.from_iterable(turn.logprobs or [0.0] * len(turn.token_ids) for _, turn in turns)
    return Flat(
        lengths_E=lengths_E,
        episode_N=torch.repeat_interleave(torch.arange(len(episodes)), lengths_E),
        mask_N=torch.ones(int(lengths_T.sum()))
        if only_sampled
        else torch.repeat_interleave(torch.tensor([float(turn.sampled) for _, turn in turns]), lengths_T),
        rollout_N=torch.from_numpy(np.fromiter(rollout, np.float32, int(lengths_T.sum()))),
    )


def select(lengths_E: torch.Tensor, chosen: list[int]) -> torch.Tensor:
    """Flat positions of the response tokens of the chosen episodes, in that order: `x_N[select(lengths_E, mine)]` are a rank's tokens."""
    lengths = lengths_E.numpy()
    starts = np.cumsum(lengths) - lengths
    return torch.from_numpy(_spans(starts[chosen], lengths[chosen]))


def pack(
    sequences: list[Sequence],
    budget: int,
    *,
    pad_id: int,
    one_row: bool = False,
    alone: bool = False,
    count: int = 0,
    together: int = 1,
    what: str = "trainer.micro_batch_tokens",
) -> list[Batch]:
    """Micro-batches of at most `budget` = R*L input tokens, padding included; each sequence is in exactly one of them.

    `one_row` lays everything of a micro-batch in one row, as flash attention needs it: transformers finds packed sequences for it only
    where R is 1. `alone` gives each sequence a row of its own, for models that would look across the borders (trainer/ranks/packed.py).
    `count` asks for at least so many micro-batches (see `plan`). `together` consecutive sequences lie side by side in one
    row: what is compared must be in one micro-batch. Raises ConfigError for a sequence longer than the budget
    (the setting `what`), ValueError for one without a prompt.
    """
    for i, sequence in enumerate(sequences):
        if not len(sequence.prompt_ids):
            raise ValueError(f"sequence {i} has no prompt: its first response token has nothing to be predicted from")
    planned = plan([s.length for s in sequences], budget, one_row=one_row, alone=alone, together=together, count=count, what=what)
    if not sequences:
        return [_filler(pad_id) for _ in planned]
    source = _Source(sequences, pad_id)
    return [source.batch(rows) if rows else _filler(pad_id) for rows in planned]


def _units(lengths: list[int], together: int) -> list[int]:
    """Lengths of what is not parted."""
    if len(lengths) % together:
        raise ValueError(f"{len(lengths)} sequences do not divide into units of {together}")
    return [sum(lengths[i : i + together]) for i in range(0, len(lengths), together)]


def _members(units: list[int], together: int) -> list[int]:
    """The sequences of these units."""
    return [unit * together + i for unit in units for i in range(together)]


def plan(
    lengths: list[int],
    budget: int,
    *,
    one_row: bool = False,
    alone: bool = False,
    together: int = 1,
    count: int = 0,
    what: str = "trainer.micro_batch_tokens",
) -> list[Rows]:
    """Which sequences share a row, which rows a micro-batch. Deterministic. See `pack`.

    Best fit, longest first: rows are as long as the longest sequence left, as many are opened as the budget allows, and shorter
    sequences fill their ends. Where that would waste much, longer rows are tried. With `count` above what is needed, micro-batches are
    split by rows, and empty ones appended when there are no more rows: under ZeRO every rank must run the same number of passes.
    """
    if alone:
        return _spread(_alone(lengths, budget, together, what), count, together)
    lengths = _units(lengths, together)
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    if order and lengths[order[0]] > budget:
        raise ConfigError(f"{what}: {budget}; a sequence has {lengths[order[0]]} tokens and must fit into a micro-batch")
    planned: list[Rows] = []
    while order:
        widths = (budget,) if one_row else WIDTHS  # capped at the budget: one row
        rows, order = _micro_batch(order, lengths, budget, widths)
        planned.append(rows)
    return _spread([[_members(row, together) for row in rows] for rows in planned], count)


def _alone(lengths: list[int], budget: int, together: int, what: str) -> list[Rows]:
    """Rows of one sequence each, the longest first, so that those of a micro-batch are about as long; units are not parted."""
    longest = [max(lengths[i : i + together]) for i in range(0, len(lengths), together)]
    order = sorted(range(len(longest)), key=lambda i: (-longest[i], i))
    planned: list[Rows] = []
    while order:
        size = max(longest[order[0]], 1) * together
        if size > budget:
            raise ConfigError(f"{what}: {budget}; {together} rows of {size // together} tokens must fit into a micro-batch, {size} in all")
        chosen, order = order[: budget // size], order[budget // size :]
        planned.append([[i] for i in _members(chosen, together)])
    return planned


def _micro_batch(order: list[int], lengths: list[int], budget: int, widths: tuple[float, ...]) -> tuple[Rows, list[int]]:
    """The rows of the next micro-batch and the sequences left, with the least of `widths` that wastes little, or wastes least."""
    best: tuple[tuple[bool, float], Rows, list[int]] = ((False, -1.0), [], [])
    for width in widths:
        size = max(min(int(lengths[order[0]] * width), budget), 1)
        rows, rest = _fill(order, lengths, size, budget // size)
        used_R = [sum(lengths[i] for i in row) for row in rows]
        share = sum(used_R) / (max(used_R) * len(rows))
        if (not rest, share) > best[0]:  # never one more pass to save some padding in the last
            best = ((not rest, share), rows, rest)
        one_each = max(map(len, rows)) == 1
        if share >= (ENOUGH_UNPACKED if one_each else ENOUGH):
            break
    return best[1], best[2]


def _fill(order: list[int], lengths: list[int], size: int, limit: int) -> tuple[Rows, list[int]]:
    """Put sequences, longest first, into the fullest row that has space, at most `limit` rows of `size`; return rows and the rest."""
    rows: Rows = []
    space: list[tuple[int, int]] = []  # (free tokens, row), ascending
    free, shortest = size * limit, lengths[order[-1]]
    rest: list[int] = []
    for at, i in enumerate(order):
        if free < shortest:
            return rows, rest + order[at:]
        fit = bisect_left(space, (lengths[i], -1))
        if fit < len(space):
            left, row = space.pop(fit)
            rows[row].append(i)
        elif len(rows) < limit:
            left, row = size, len(rows)
            rows.append([i])
        else:
            rest.append(i)
            continue
        free -= lengths[i]
        if left - lengths[i] >= shortest:
            insort(space, (left - lengths[i], row))
    return rows, rest


def _spread(planned: list[Rows], count: int, unit: int = 1) -> list[Rows]:
    """At least `count` micro-batches: halve the one with the most rows while there is one with two, or with two units of rows."""
    while len(planned) < count:
        most = max(range(len(planned)), key=lambda i: len(planned[i]), default=None)
        if most is None or len(planned[most]) < 2 * unit:
            return planned + [[]] * (count - len(planned))
        half = len(planned[most]) // unit // 2 * unit
        planned[most : most + 1] = [planned[most][:half], planned[most][half:]]
    return planned


def _spans(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """start, start+1, ... for each span, laid end to end."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()), dtype=np.int64)


class _Source:
    """All sequences as flat arrays, from which each micro-batch is cut without a loop over tokens."""

    def __init__(self, sequences: list[Sequence], pad_id: int):
        self.pad_id = pad_id
        self.prompt_E = np.array([len(s.prompt_ids) for s in sequences], dtype=np.int64)
        self.response_E = np.array([len(s.response_ids) for s in sequences], dtype=np.int64)
        whole_E = self.prompt_E + self.response_E
        self.fed_E = self.prompt_E + np.maximum(self.response_E - 1, 0)
        self.ids = np.fromiter(chain.from_iterable(chain(s.prompt_ids, s.response_ids) for s in sequences), np.int64, int(whole_E.sum()))
        self.start_E = np.cumsum(whole_E) - whole_E
        self.flat_E = np.cumsum(self.response_E) - self.response_E
        self.tokens = {name: self._column(sequences, name) for name in sequences[0].tokens}
        self.experts = end_to_end([(s.experts, s.length) for s in sequences])
        self.fed_start_E = np.cumsum(self.fed_E) - self.fed_E
        self.pictures_E = [s.pictures for s in sequences] if any(s.pictures for s in sequences) else []

    def _column(self, sequences: list[Sequence], name: str) -> np.ndarray:
        for i, sequence in enumerate(sequences):
            values, n = len(sequence.tokens[name]), len(sequence.response_ids)
            if values != n:
                raise ValueError(f"sequence {i}: {name!r} has {values} values for {n} response tokens")
        return np.concatenate([np.asarray(s.tokens[name], dtype=np.float32) for s in sequences])

    def batch(self, rows: Rows) -> Batch:
        chosen = np.fromiter(chain.from_iterable(rows), np.int64)
        row_S = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        fed_S, prompt_S, response_S = self.fed_E[chosen], self.prompt_E[chosen], self.response_E[chosen]
        used_R = np.bincount(row_S, weights=fed_S, minlength=len(rows)).astype(np.int64)
        columns = int(used_R.max())
        # Where each sequence begins in the (R*L) flat micro-batch: what lies before it, with each row filled up to L.
        before_S = np.cumsum(fed_S) - fed_S
        begin_S = before_S - np.repeat(np.cumsum(used_R) - used_R, [len(row) for row in rows]) + row_S * columns
        where = _spans(begin_S, fed_S)
        input_ids = np.full(len(rows) * columns, self.pad_id, dtype=np.int64)
        input_ids[where] = self.ids[_spans(self.start_E[chosen], fed_S)]
        packed = len(chosen) > len(rows)
        position = np.broadcast_to(np.arange(columns), (len(rows), columns))
        if packed:
            # Padding is a sequence of its own, so that it is seen by nothing.
            position = np.where(position < used_R[:, None], position, position - used_R[:, None]).reshape(-1)
            position[where] = _spans(np.zeros_like(fed_S), fed_S)
        flat_N = _spans(self.flat_E[chosen], response_S)
        experts = None
        if self.experts is not None:
            laid = unknown(self.experts, len(input_ids))
            laid[where] = self.experts[_spans(self.fed_start_E[chosen], fed_S)]
            experts = torch.from_numpy(laid.reshape(len(rows), columns, *laid.shape[1:]))
        return Batch(
            input_ids_RL=torch.from_numpy(input_ids.reshape(len(rows), columns)),
            position_ids_RL=torch.from_numpy(np.array(position).reshape(len(rows), columns)),
            index_N=torch.from_numpy(_spans(begin_S + prompt_S - 1, response_S)),
            target_N=torch.from_numpy(self.ids[_spans(self.start_E[chosen] + prompt_S, response_S)]),
            episode_N=torch.from_numpy(np.repeat(chosen, response_S)),
            flat_N=torch.from_numpy(flat_N),
            tokens_N={name: torch.from_numpy(column[flat_N]) for name, column in self.tokens.items()},
            packed=packed,
            real_tokens=int(fed_S.sum()),
            experts_RLMK=experts,
            seen_S=tuple(zip(begin_S.tolist(), fed_S.tolist(), (self.pictures_E[i] for i in chosen), strict=True))
            if self.pictures_E
            else (),
        )


def _filler(pad_id: int) -> Batch:
    """A micro-batch that teaches nothing, for a rank that has run out of sequences while others have not."""
    none = torch.zeros(0, dtype=torch.int64)
    return Batch(
        input_ids_RL=torch.full((1, 1), pad_id),
        position_ids_RL=torch.zeros((1, 1), dtype=torch.int64),
        index_N=none,
        target_N=none,
        episode_N=none,
        flat_N=none,
        tokens_N={},
        packed=False,
        real_tokens=0,
    )


def attach(
    batches: list[Batch],
    tokens_N: Mapping[str, torch.Tensor],
    counts: Denominators | None = None,
    numbers: Mapping[str, float] | None = None,
) -> None:
    """Give each micro-batch its share of tensors in the caller's flat order, so that one packing serves several passes, and what all of
    an optimizer step share: its counts and numbers."""
    for batch in batches:
        batch.counts, batch.numbers = counts, dict(numbers or {})
        batch.tokens_N.update({name: values_N[batch.flat_N] for name, values_N in tokens_N.items()})


def scatter(outputs: list[torch.Tensor], batches: list[Batch]) -> torch.Tensor:
    """Per-token outputs of the micro-batches, back in the caller's flat order [N]."""
    flat_N = torch.cat([batch.flat_N for batch in batches])
    joined_N = torch.cat(outputs)
    return torch.empty_like(joined_N).index_copy_(0, flat_N.to(joined_N.device), joined_N)


def split(
    lengths: list[int], ranks: int, budget: int, *, one_row: bool = False, alone: bool = False, together: int = 1
) -> tuple[list[list[int]], int]:
    """Each rank's sequences, and the number of micro-batches that every rank must run (ZeRO's collectives are per micro-batch)."""
    if ranks == 1:
        return [list(range(len(lengths)))], 0
    units = _units(lengths, together)
    shares = balance(units, ranks)
    members = [_members(share, together) for share in shares]
    cut = {"one_row": one_row, "alone": alone, "together": together}
    return members, max(len(plan([lengths[i] for i in mine], budget, **cut)) for mine in members)


def balance(lengths: list[int], ranks: int) -> list[list[int]]:
    """Sequences of each rank, ascending: equal counts (within one) and nearly equal tokens. Deterministic.

    The balanced largest differencing method (Michiels, Korst, Aarts, van Leeuwen 2003): Karmarkar and Karp's with equal counts.
    """
    if ranks < 1:
        raise ValueError(f"ranks is {ranks}; it must be at least 1")
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    padded: list[int | None] = [*order, *[None] * (-len(order) % ranks)]
    # A partial split: for each rank its tokens and sequences, heaviest first. Two are merged heaviest with lightest.
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for at in range(0, len(padded), ranks):
        split = [(0, []) if i is None else (lengths[i], [i]) for i in padded[at : at + ranks]]
        heap.append((split[-1][0] - split[0][0], at, split))
    heapq.heapify(heap)
    serial = len(padded)
    while len(heap) > 1:
        (_, _, first), (_, _, second) = heapq.heappop(heap), heapq.heappop(heap)
        merged = [(a + b, left + right) for (a, left), (b, right) in zip(first, reversed(second), strict=True)]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], serial, merged))
        serial += 1
    return [sorted(chosen) for _, chosen in heap[0][2]] if heap else [[] for _ in range(ranks)]


def efficiency(batches: list[Batch]) -> float:
    """Real input tokens over all input positions, padding included."""
    return sum(b.real_tokens for b in batches) / max(sum(b.input_ids_RL.numel() for b in batches), 1)
