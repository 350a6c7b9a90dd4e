"""Shapes of a few published models, so that a run can be planned before anything of its model is here.

As in the config.json that each model was published with, noted on 2026-11-25. A plan alone reads them, and only where the model's own file
is not in a folder or in the hub's cache; tests count each one's parameters.
"""

from __future__ import annotations

from typing import Any


def _qwen(hidden: int, inner: int, layers: int, heads: int, pairs: int, vocabulary: int = 152_064, **more: Any) -> dict[str, Any]:
    return _config("qwen2", hidden, inner, layers, heads, pairs, vocabulary, **more)


def _llama(hidden: int, inner: int, layers: int, heads: int, pairs: int) -> dict[str, Any]:
    return _config("llama", hidden, inner, layers, heads, pairs, 128_256)


def _config(
    kind: str, hidden: int, inner: int, layers: int, heads: int, pairs: int, vocabulary: int, tied: bool = False, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": pairs,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        **more,
    }


_QWEN_2_5 = {
    "0.5B": _qwen(896, 4864, 24, 14, 2, 151_936, tied=True),
    "1.5B": _qwen(1536, 8960, 28, 12, 2, 151_936, tied=True),
    "3B": _qwen(2048, 11008, 36, 16, 2, 151_936, tied=True),
    "7B": _qwen(3584, 18944, 28, 28, 4),
    "14B": _qwen(5120, 13824, 48, 40, 8),
    "32B": _qwen(5120, 27648, 64, 40, 8),
    "72B": _qwen(8192, 29568, 80, 64, 8),
}
_LLAMA_3_1 = {"8B": _llama(4096, 14336, 32, 32, 8), "70B": _llama(8192, 28672, 80, 64, 8)}
_EXPERTS: dict[str, Any] = {"num_local_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
_QWEN_3_30B = _config("qwen3_moe", 2048, 6144, 48, 32, 4, 151_936, head_dim=128, **_EXPERTS)
_GPT_OSS_20B = _config("gpt_oss", 2880, 2880, 24, 64, 8, 201_088, head_dim=64, num_local_experts=32, num_experts_per_tok=4)
_TOWER_2_5 = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14, "spatial_merge_size": 2}
_QWEN_2_5_VL = {
    size: {
        "model_type": "qwen2_5_vl",
        "text_config": {key: value for key, value in _QWEN_2_5[size].items() if key not in ("model_type", "tie_word_embeddings")},
        "vision_config": {**_TOWER_2_5, "out_hidden_size": _QWEN_2_5[size]["hidden_size"]},
        "tie_word_embeddings": _QWEN_2_5[size]["tie_word_embeddings"],
    }
    for size in ("3B", "7B")
}
SHAPES: dict[str, dict[str, Any]] = {
    **{f"Qwen/Qwen2.5-{size}{tuned}": shape for size, shape in _QWEN_2_5.items() for tuned in ("", "-Instruct")},
    **{f"Qwen/Qwen2.5-VL-{size}-Instruct": shape for size, shape in _QWEN_2_5_VL.items()},
    **{f"meta-llama/Llama-3.1-{size}{tuned}": shape for size, shape in _LLAMA_3_1.items() for tuned in ("", "-Instruct")},
    "Qwen/Qwen3-8B": _config("qwen3", 4096, 12288, 36, 32, 8, 151_936, head_dim=128),
    "Qwen/Qwen3-8B-Base": _config("qwen3", 4096, 12288, 36, 32, 8, 151_936, head_dim=128),
    **dict.fromkeys(("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B-Instruct-2507", "Qwen/Qwen3-30B-A3B-Base"), _QWEN_3_30B),
    "meta-llama/Llama-3.3-70B-Instruct": _LLAMA_3_1["70B"],
    "openai/gpt-oss-20b": _GPT_OSS_20B,
    "unsloth/gpt-oss-20b-BF16": _GPT_OSS_20B,
}
