"""Sequence parallelism: ranks that share each sequence, so that its activations need not fit on one GPU.

DeepSpeed-Ulysses (Jacobs et al. 2023, https://arxiv.org/abs/2309.14509): each of `size` ranks has 1 / size of every row's columns; for
attention alone an exchange gives it all columns of 1 / size of the heads, and another takes them back. What a model returns per token
is put together afterwards, so objectives see whole sequences as without. Here are the cut, the exchange and the joining; the exchange
itself, with its gradient, is DeepSpeed's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import pad

from trainer.data.packing import Sequence, pack
from trainer.episodes import Batch
from trainer.errors import ConfigError
from trainer.models import dimensions
from trainer.models.heads import backbone

SETTING = "trainer.sequence_parallel"
PREFIX = "ulysses_"
LENGTHS = 9, 7  # tokens of two sequences that the model is tried with
MOST = {torch.float32: 1e-4}  # of the size of hidden states, which kernels round otherwise; and of other types:
MOST_ROUNDED = 0.1
Attention = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


class SequenceParallel:
    """This rank's place among the `size` ranks, each `apart` from the next, that share sequences. Collective over all ranks.

    `apart` consecutive ranks have the same part of a sequence, and parts of matrices (`trainer.tensor_parallel`).
    """

    def __init__(self, size: int, rank: int, world: int, apart: int = 1):
        self.size, self.apart, self.index = size, apart, rank // apart % size
        firsts = [first + lane for first in range(0, world, size * apart) for lane in range(apart)]
        groups = {first: dist.new_group([*range(first, first + size * apart, apart)]) for first in firsts}  # every rank makes all of them
        self.group: Any = groups[rank - self.index * apart]
        self.names: set[str] = set()  # of attention that was registered
        self.whole: Batch | None = None  # the micro-batch that is worked on
        self.masks: dict[int | None, torch.Tensor] = {}  # of it, where attention needs some, by the window
        self.parts = True

    def attach(self, module: nn.Module, lm: Any, joined: bool = True) -> None:
        """Have `module`, which has `lm` in it, work on this rank's part of each micro-batch; `joined`: and return all of its outputs.

        Raises ConfigError for a model whose layers look at other tokens by other means than causal attention.
        """
        from transformers import AttentionInterface
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        require(lm, self.size, self.apart)
        core = lm.config._attn_implementation
        if core == "eager":
            raise ConfigError(f"{SETTING}={self.size}: {lm.config.model_type} has attention that sdpa and varlen do not compute; use 1")
        masked = core == "sdpa"
        # transformers makes no masks for names that it does not know; flash_attention_2 needs none, and looks for its kernels by its name.
        name = core if core == "flash_attention_2" else PREFIX + core
        if name not in self.names:
            AttentionInterface.register(name, self.attention(ALL_ATTENTION_FUNCTIONS[core], masked=masked))
            self.names.add(name)
        lm.set_attn_implementation(name)
        module.register_forward_pre_hook(lambda _, inputs: (self.part(inputs[0]),) if self.parts else None)
        if joined:
            module.register_forward_hook(lambda _, __, outputs: tuple(map(self.join, outputs)) if self.parts else None)

    @contextmanager
    def not_parted(self, lm: Any) -> Iterator[None]:
        """Every rank has whole micro-batches meanwhile."""
        name = lm.config._attn_implementation
        lm.set_attn_implementation(name.removeprefix(PREFIX))
        self.parts = False
        try:
            yield
        finally:
            lm.set_attn_implementation(name)
            self.parts = True

    @torch.no_grad()
    def difference(self, compute: Callable[[Batch], Any], lm: Any, device: torch.device) -> float:
        """Between what these ranks make of two sequences in one row and what each makes of them alone: of the hidden states of `lm`, which
        `compute` runs, relative to their size and beyond what may be rounding; else 0. Collective; two passes.
        """
        vocabulary = lm.config.get_text_config().vocab_size
        texts = [[(start + 5 * i) % vocabulary for i in range(length)] for start, length in enumerate(LENGTHS, 1)]
        hidden: list[torch.Tensor] = []
        hook = backbone(lm).register_forward_hook(lambda _, __, output: hidden.append(output.last_hidden_state.float()))
        try:
            for alone in (True, False):
                budget = 2 * max(LENGTHS) if alone else sum(LENGTHS)
                [batch] = pack([Sequence(ids, ids[:1]) for ids in texts], budget, pad_id=0, one_row=not alone, alone=alone)
                if alone:
                    with self.not_parted(lm):
                        compute(batch.to(device))
                else:
                    compute(batch.to(device))
        finally:
            hook.remove()
        whole_LD, mine_LD = torch.cat([hidden[0][row, :length] for row, length in enumerate(LENGTHS)]), hidden[1][0]
        expected_LD = whole_LD[self.index * len(mine_LD) :][: len(mine_LD)]
        found = float((mine_LD[: len(expected_LD)] - expected_LD).norm() / whole_LD.norm())
        return found if not found <= MOST.get(next(lm.parameters()).dtype, MOST_ROUNDED) else 0.0

    def part(self, whole: Batch) -> Batch:
        """This rank's columns of it, which are filled up to divide, and the targets that they predict."""
        filled = _filled(whole, self.size)
        self.whole, self.masks = filled, {}
        columns = filled.input_ids_RL.size(1) // self.size
        here = slice(self.index * columns, (self.index + 1) * columns)
        row_N, column_N = filled.index_N // (columns * self.size), filled.index_N % (columns * self.size)
        self.mine_N = (column_N // columns == self.index).nonzero()[:, 0]
        return replace(
            filled,
            input_ids_RL=filled.input_ids_RL[:, here],
            position_ids_RL=filled.position_ids_RL[:, here],
            experts_RLMK=None if filled.experts_RLMK is None else filled.experts_RLMK[:, here],
            index_N=(row_N * columns + column_N - here.start)[self.mine_N],
            target_N=filled.target_N[self.mine_N],
            packed=True,  # positions do not begin at 0
        )

    def join(self, values_n: torch.Tensor) -> torch.Tensor:
        """The outputs of all ranks for the micro-batch's targets [N]; each rank's gradient is that of its own."""
        assert self.whole is not None, "of a micro-batch that was parted"
        return _Join.apply(values_n, self.mine_N, len(self.whole.index_N), self.group)  # type: ignore[no-any-return]

    def attention(self, core: Attention, *, masked: bool) -> Attention:
        """`core`, an attention of transformers, over whole rows. `masked`: it finds borders of packed sequences by a mask."""
        from deepspeed.sequence.layer import _SeqAllToAll

        def exchange(x: torch.Tensor, scatter: int, gather: int) -> torch.Tensor:  # (R, L, heads, width)
            return _SeqAllToAll.apply(self.group, x, scatter, gather, 0)  # type: ignore[no-any-return]

        def attend(
            module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **more: Any
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            if not self.parts:  # flash_attention_2 keeps its name, so it is called meanwhile too
                return core(module, query, key, value, mask, **more)
            assert self.whole is not None, "a micro-batch is parted before it is read"
            if (copies := self.size // key.size(1)) > 1:  # fewer heads of keys and values than ranks: each rank gets one
                key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
            query, key, value = (exchange(x.transpose(1, 2), 2, 1).transpose(1, 2) for x in (query, key, value))
            module.num_key_value_groups = query.size(1) // key.size(1)  # type: ignore[assignment]
            window: int | None = more.get("sliding_window")
            mask = self._mask(window) if masked and (self.whole.packed or window is not None) else None
            output, weights = core(module, query, key, value, mask, **more | {"position_ids": self.whole.position_ids_RL})
            return exchange(output, 1, 2), weights

        return attend

    def _mask(self, window: int | None) -> torch.Tensor:
        """Once for all layers that have this one."""
        assert self.whole is not None
        if window not in self.masks:
            self.masks[window] = _mask(self.whole, window)
        return self.masks[window]


def require(lm: Any, size: int, apart: int = 1) -> None:
    """Raises ConfigError for a model that cannot be parted into so many, or whose layers look at other tokens in other ways.

    Each rank has one of `apart` parts of the heads.
    """
    config = lm.config.get_text_config()
    others = {*(getattr(config, "layer_types", None) or [])} - {"full_attention", "sliding_attention"}
    if others or lm._is_stateful or not lm._can_set_attn_implementation():
        kinds = ", ".join(sorted(others)) or ("recurrence" if lm._is_stateful else "its own attention")
        raise ConfigError(f"{SETTING}={size}: {config.model_type} has layers of {kinds}; use 1")
    for layer in dict.fromkeys(dimensions.layers(config)):
        own, pairs = layer.heads // apart, layer.pairs // apart
        if own % size or (pairs % size and size % pairs):
            heads = f"{own} attention heads, {pairs} of keys and values"
            raise ConfigError(f"{SETTING}={size}: {config.model_type} has {heads}; they must divide by it")


def _filled(batch: Batch, size: int) -> Batch:
    """With columns that divide: each more is a sequence of its own, or, in rows of one sequence, comes after it."""
    columns = batch.input_ids_RL.size(1)
    if not (more := -columns % size):
        return batch
    positions_RL = pad(batch.position_ids_RL, (0, more))
    if not batch.packed:
        positions_RL = torch.arange(columns + more, device=positions_RL.device).expand_as(positions_RL)
    index_N = batch.index_N // columns * (columns + more) + batch.index_N % columns
    experts = batch.experts_RLMK
    if experts is not None:  # of padding none is known
        experts = pad(experts, (0, 0, 0, 0, 0, more), value=torch.iinfo(experts.dtype).max)
    return replace(
        batch, input_ids_RL=pad(batch.input_ids_RL, (0, more)), position_ids_RL=positions_RL, index_N=index_N, experts_RLMK=experts
    )


def _mask(whole: Batch, window: int | None = None) -> torch.Tensor:
    """Which tokens of its row each may look at (R, 1, L, L): those of its sequence before it, in its `window` where there is one."""
    sequence_RL = (whole.position_ids_RL == 0).cumsum(1)
    same = sequence_RL[:, None, :, None] == sequence_RL[:, None, None, :]
    mask = same & torch.ones(same.shape[-2:], dtype=torch.bool, device=same.device).tril()
    return mask if window is None else mask.triu(1 - window)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_n: torch.Tensor, where_n: torch.Tensor, count: int, group: Any) -> torch.Tensor:
        ctx.save_for_backward(where_n)
        joined_N = values_n.new_zeros((count, *values_n.shape[1:])).index_copy(0, where_n, values_n)
        dist.all_reduce(joined_N, group=group)
        return joined_N

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (where_n,) = ctx.saved_tensors
        return gradients[0][where_n], None, None, None
