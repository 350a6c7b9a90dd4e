"""A checkpoint's tensors into a model that vLLM serves already, whose kernels may want some in another layout than the checkpoint's.

vLLM makes that layout once, when it has loaded a model: it repacks experts, and makes matrices of its own for latent attention. What has
come is laid out again here. vLLM's own reload does so too, but on CPUs not for experts, and misses what a model's loader writes without
the parameter's (GPT-OSS, MiniMax M2, Step-3); it is for quantized models alone.
"""

from __future__ import annotations

import re
from itertools import groupby
from typing import Any

import torch
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import _copy_and_restore_kernel_tensors, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_layer, restore_layer_on_meta
from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers
from vllm.platforms import current_platform

from trainer.errors import RunError

Named = list[tuple[str, torch.Tensor]]
AS_LOADED = (type(None), UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
NUMBER = re.compile(r"\.(\d+)\.")  # of a layer, in the names of both


class Loading:
    """Of one weight sync, of a model without quantization. Call all of it with vLLM's configuration set."""

    def __init__(self, model: Any, config: Any):
        self.model, self.config = model, config
        self.experts = _experts(model)
        self.layer: int | None = None  # whose tensors come now
        self.ended: set[int | None] = set()

    def load(self, tensors: Named) -> None:
        """In the order of layers. Raises RunError where one comes in two parts, with its experts laid out in between."""
        for layer, own in groupby(tensors, key=lambda each: number(each[0])):
            if layer != self.layer:
                self._end_layer()
                if layer in self.ended & self.experts.keys():
                    raise RunError(f"weight sync: parameters of layer {layer} come in two parts, which vLLM cannot load")
                self._begin_layer(layer)
            self.model.load_weights(list(own))

    def end(self) -> None:
        """All have come."""
        self._end_layer()
        for module in self.model.modules():
            sinks = getattr(getattr(module, "impl", None), "sinks", None)  # of which kernels keep a copy in float32
            if isinstance(module, MLAAttention) or sinks is not None:
                module.process_weights_after_loading(self.config.dtype)

    def _begin_layer(self, layer: int | None) -> None:
        self.layer = layer
        for module in self.experts.get(layer, []):
            info = get_layerwise_info(module)
            info.kernel_tensors = get_layer_params_buffers(module)
            info.kernel_non_persistent_buffers = set(module._non_persistent_buffers_set)
            restore_layer_on_meta(module, info)
            materialize_layer(module, info)

    def _end_layer(self) -> None:
        for module in self.experts.get(self.layer, []):
            if current_platform.is_cpu():  # where vLLM packs experts as it makes their kernel, and otherwise leaves them
                module.quant_method.moe_kernel = None
            module.quant_method.process_weights_after_loading(module)
            info = get_layerwise_info(module)
            _copy_and_restore_kernel_tensors(module, info)  # CUDA graphs know where they were
            info.reset()
        self.ended.add(self.layer)
        self.layer = None


class QuantizedLoading:
    """As Loading, by vLLM's own reload."""

    def __init__(self, model: Any, config: Any):
        self.model, self.config = model, config
        initialize_layerwise_reload(model)

    def load(self, tensors: Named) -> None:
        self.model.load_weights([(name, tensor.clone()) for name, tensor in tensors])  # kept until a layer is complete

    def end(self) -> None:
        finalize_layerwise_reload(self.model, self.config)


def loading(model: Any, config: Any) -> Loading | QuantizedLoading:
    """`config`: vLLM's of the model."""
    quantized = any(not isinstance(_method(module), (*AS_LOADED, UnquantizedFusedMoEMethod)) for module in model.modules())
    return (QuantizedLoading if quantized else Loading)(model, config)


def number(name: str) -> int | None:
    """Of the layer that a tensor or module belongs to."""
    found = NUMBER.search(f".{name}.")
    return int(found[1]) if found else None


def _experts(model: Any) -> dict[int | None, list[Any]]:
    """By layer."""
    found: dict[int | None, list[Any]] = {}
    for name, module in model.named_modules():
        if isinstance(_method(module), UnquantizedFusedMoEMethod):
            found.setdefault(number(name), []).append(module)
    return found


def _method(module: Any) -> Any:
    return getattr(module, "quant_method", None)
