"""QLoRA: frozen weights in 4 bits below adapters, by bitsandbytes (Dettmers et al., 2023, https://arxiv.org/abs/2305.14314).

NF4 in blocks of 64 weights, each with a scale in float32, which is not quantized again: weights that went through it once are the same to
the bit when they go through it again. So rollout engines can have them as plain weights, and sample from what is trained.
"""

from __future__ import annotations

from typing import Any

import torch

from trainer.errors import ConfigError

BLOCK = 64  # weights that share a scale


def settings(dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """What `from_pretrained` takes, to quantize all linear layers but the head as it reads them."""
    from transformers import BitsAndBytesConfig

    kind = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype, "bnb_4bit_use_double_quant": False}
    return {"quantization_config": BitsAndBytesConfig(**kind), "device_map": {"": device}}


def settle(lm: Any) -> None:
    """After loading: it is saved as a model that is not quantized, and its layers compute the same in train and eval mode on any CPU.

    Raises ConfigError for layers that bitsandbytes 0.50 does not quantize right on CPUs: whose rows end within a block.
    """
    for name, module in lm.named_modules():
        if hasattr(module, "quant_state") and module.in_features % BLOCK:
            raise ConfigError(f"model.lora.quantize=nf4: {name} has {module.in_features} inputs; blocks of {BLOCK} must fill its rows")
    del lm.config.quantization_config
    lm.hf_quantizer, lm.is_quantized = None, False
    for module in lm.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):  # else eval mode packs the weights in another order, for a kernel of its own
            module.support_avx512bf16_for_cpu = False


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """What the layers compute with: [out, in] in the model's type; a parameter that is not quantized as it is."""
    state = getattr(parameter, "quant_state", None)
    if state is None:
        return parameter.detach()
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(parameter.data, state)


def move(parameter: torch.Tensor, device: torch.device) -> None:
    """In place, with the scales."""
    parameter.data = parameter.data.to(device)
    if (state := getattr(parameter, "quant_state", None)) is not None:
        state.to(device)
