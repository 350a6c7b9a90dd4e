"""Flash attention over packed sequences by torch's own kernel: nothing to compile or to install, and no mask.

https://docs.pytorch.org/docs/stable/nn.attention.varlen.html; registered with transformers as `varlen`
(https://huggingface.co/docs/transformers/main/en/attention_interface).
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn
from transformers import AttentionInterface

from trainer.configs.sections import Config, ModelConfig
from trainer.errors import ConfigError
from trainer.models import dimensions

C = TypeVar("C", bound=Config)
NAME = "varlen"
OLDEST = (8, 0)  # compute capability that the kernel is made for
WIDEST = 256  # of a head, in the kernel
# What some architectures do inside attention, which neither the kernel nor sdpa does: a setting, and the name of a weight.
INSIDE, SINKS = "attn_logit_softcapping", ".sinks"

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


def settle(config: C, lm: Any, unable: str) -> C:
    """`config` as it is where `auto` takes the kernel for the model that is trained, else with `plain` in its place; says which, once.

    `unable`: see there, of the ranks' devices. Other models of the run are looked at where they are loaded.
    """
    if config.model.attention != "auto":
        return config
    reasons = _reasons(lm, config.model.dtype, unable)
    kernel = plain(lm) if reasons else NAME
    print(f"model.attention: {kernel}{f' ({reasons[0]})' if reasons else ''}", flush=True)
    return config.model_copy(update={"model": config.model.model_copy(update={"attention": kernel})}) if reasons else config


def plain(lm: Any) -> str:
    """The kernel that transformers has for every device: sdpa, or eager for a model that it cannot compute."""
    return "sdpa" if lm._supports_sdpa and _cap(lm) is None else "eager"


def fit(lm: Any, model: ModelConfig, device: torch.device) -> None:
    """Give a model the kernel where `auto` may. Raises ConfigError for one that is asked for and cannot compute this model."""
    if model.attention == "auto":
        lm.set_attn_implementation(plain(lm) if _reasons(lm, model.dtype, unable(device)) else NAME)
    elif model.attention == NAME and (reasons := _unfit(lm)):
        others = "sdpa or eager" if plain(lm) == "sdpa" else "eager"
        raise ConfigError(f"model.attention={NAME}: {lm.config.model_type} has {', '.join(reasons)}; use {others}")
    elif model.attention == "sdpa" and (cap := _cap(lm)) is not None:  # transformers leaves it out without a word
        raise ConfigError(f"model.attention=sdpa: {lm.config.model_type} has {INSIDE}={cap}, which sdpa does not apply; use auto or eager")


def unable(device: torch.device) -> str:
    """Why the kernel does not run there, or nothing. Nobody has run it on AMD's GPUs yet, so `auto` does not take it there."""
    if device.type != "cuda":
        return "no GPU"
    if torch.version.hip:
        return "an AMD GPU"
    found = torch.cuda.get_device_capability(device)
    return "" if found >= OLDEST else f"a GPU of compute capability {found[0]}.{found[1]}, where flash attention needs 8.0"


def _reasons(lm: Any, dtype: str, unable: str) -> list[str]:
    of_type = "" if dtype == "bfloat16" else f"model.dtype={dtype}"
    return [reason for reason in (unable, of_type, *(f"{lm.config.model_type} has {reason}" for reason in _unfit(lm))) if reason]


def _cap(lm: Any) -> float | None:
    return getattr(lm.config.get_text_config(), INSIDE, None)


def _unfit(lm: Any) -> list[str]:
    reasons = [f"{INSIDE}={cap}"] if (cap := _cap(lm)) is not None else []
    if any(name.endswith(SINKS) for name, _ in lm.named_parameters()):
        reasons.append("attention sinks")
    for layer in dict.fromkeys(dimensions.layers(lm.config.get_text_config())):
        if layer.heads and (layer.width > WIDEST or layer.width % 8):
            reasons.append(f"heads of {layer.width} numbers, where multiples of 8 up to {WIDEST} are allowed")
        elif layer.values != layer.width:
            reasons.append(f"keys of {layer.width} numbers and values of {layer.values}")
    if not lm._can_set_attn_implementation():
        reasons.append("attention of its own")
    return reasons


AttentionInterface.register(NAME, attend)
