"""Sizes of a model's layers from its configuration, in which families spell them differently and some differ from layer to layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Layer:
    heads: int  # of queries; 0 in a model without attention
    pairs: int  # heads of keys and values
    width: int  # numbers of a head's query and key
    values: int  # and of its value
    inner: int  # of the MLP
    cached: int  # numbers of a token that an engine keeps


def layers(config: Any) -> list[Layer]:
    """Of each layer that `config`, of a language model's text, describes; recurrent layers of hybrids have the numbers of the others."""
    count = config.num_hidden_layers
    each = list(config.per_layer_config) if getattr(config, "is_heterogeneous", False) else [config] * count  # Gemma 4
    return [_layer(own, at) for at, own in enumerate(each)]


def _layer(config: Any, at: int) -> Layer:
    def number(name: str) -> int:
        found = getattr(config, name, None)
        return int((found[at] if isinstance(found, (list, tuple)) else found) or 0)  # a list: Gemma 3n

    heads = number("num_attention_heads")
    latent = number("qk_nope_head_dim") + number("qk_rope_head_dim")  # DeepSeek
    width = latent or number("head_dim") or config.hidden_size // max(1, heads)
    inner = number("intermediate_size") or 4 * config.hidden_size
    pairs, values = number("num_key_value_heads") or heads, number("v_head_dim") or width
    cached = number("kv_lora_rank") + number("qk_rope_head_dim") if latent else pairs * (width + values)
    return Layer(heads, pairs, width, values, inner, cached)
