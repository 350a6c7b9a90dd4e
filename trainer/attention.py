"""Flash attention over packed sequences by torch's own kernel: nothing to compile or to install, and no mask.

https://docs.pytorch.org/docs/stable/nn.attention.varlen.html; registered with transformers as `varlen`
(https://huggingface.co/docs/transformers/main/en/attention_interface).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from trainer.errors import ConfigError

NAME = "varlen"
FLASH = ("varlen", "flash_attention_2")  # kernels that know borders of sequences by their places, without a mask
WIDEST = 256  # of a head, in the kernel
# What some architectures do inside attention, which the kernel does not.
INSIDE = ("attn_logit_softcapping", "attention_sinks")

Borders = tuple[torch.Tensor, int]  # where sequences begin and the last one ends [S + 1], int32; tokens of the longest
_last: list[tuple[torch.Tensor, Borders]] = []  # of one micro-batch: all layers of a model are given the same position ids


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: None,
    *,
    position_ids: torch.Tensor,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each sequence: of `query` (R, H, L, D), `key` and `value` (R, KV, L, D), in (R, L, H, D).

    Sequences begin where `position_ids` (R or 1, L) are 0. bfloat16 and a GPU.
    """
    from torch.nn.attention import varlen

    rows, columns = query.size(0), query.size(2)
    starts, longest = borders(position_ids, rows)
    flat: Any = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]
    window = (-1 if sliding_window is None else sliding_window - 1, 0)
    kernel: Any = varlen.varlen_attn
    output = kernel(*flat, starts, starts, longest, longest, scale=scaling, window_size=window, enable_gqa=True)
    return output.unflatten(0, (rows, columns)), None


def borders(position_ids: torch.Tensor, rows: int) -> Borders:
    """Of the sequences that rows have one after another. A GPU is waited for once a micro-batch, and not in every layer."""
    if not _last or _last[0][0] is not position_ids:
        flat = position_ids.expand(rows, -1).reshape(-1)
        ends = flat.new_tensor([len(flat)])
        starts = torch.cat([(flat == 0).nonzero()[:, 0], ends])
        _last[:] = [(position_ids, (starts.int(), int(starts.diff().max())))]
    return _last[0][1]


def require(lm: Any) -> None:
    """Raises ConfigError for a model whose attention the kernel does not compute."""
    config = lm.config.get_text_config()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    reasons = [f"{name}={value}" for name in INSIDE if (value := getattr(config, name, None)) is not None]
    if width > WIDEST or width % 8:
        reasons.append(f"heads of {width} numbers, where multiples of 8 up to {WIDEST} are allowed")
    if not lm._can_set_attn_implementation():
        reasons.append("attention of its own")
    if reasons:
        raise ConfigError(f"model.attention={NAME}: {config.model_type} has {', '.join(reasons)}; use sdpa or eager")


AttentionInterface.register(NAME, attend)
