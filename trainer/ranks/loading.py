"""A model that transformers loads sharded (ZeRO-3): no rank holds it whole, neither on its device nor, beyond a layer, in memory.

https://huggingface.co/docs/transformers/main/en/deepspeed#non-trainer-deepspeed-integration
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from trainer.ranks import engine

LAYER = re.compile(r".*?\.\d+\.")  # of a weight's name: up to the number of its layer, if it has one


@contextmanager
def sharded(dtype: torch.dtype) -> Iterator[None]:
    """Inside, transformers loads models whose parameters are partitioned at once (ZeRO-3): no rank holds a whole one on its device.

    https://huggingface.co/docs/transformers/main/en/deepspeed#non-trainer-deepspeed-integration
    Buffers keep their types: DeepSpeed would make the frequencies of rotary embeddings bfloat16, which after a thousand tokens are others.
    """
    from deepspeed.runtime.zero import partition_parameters
    from transformers import core_model_loading, modeling_utils
    from transformers.integrations import deepspeed as integration

    construct = partition_parameters.zero_wrapper_for_fp_tensor_constructor

    def uncast(make: Callable[..., torch.Tensor], target_fp_dtype: Any, target_device: Any) -> Callable[..., torch.Tensor]:
        return construct(make, None, target_device)  # type: ignore[no-any-return]

    config = _Zero3(engine.configuration(dtype, 3))  # transformers holds it by a weak reference
    integration.set_hf_deepspeed_config(config)
    try:
        load: Any = modeling_utils._load_state_dict_into_zero3_model  # type: ignore[attr-defined]
        by_layer = patch.object(modeling_utils, load.__name__, _by_layer(load))
        turned = patch.object(core_model_loading.Transpose, "convert", _by_whole_shapes(core_model_loading.Transpose.convert))
        with engine.quiet(), patch.object(partition_parameters, construct.__name__, uncast), by_layer, turned:
            yield
    finally:
        integration.unset_hf_deepspeed_config()


@dataclass
class _Zero3:
    """What transformers asks for; its own HfDeepSpeedConfig needs accelerate, which nothing else here does."""

    config: dict[str, Any]

    def is_zero3(self) -> bool:
        return True


def _by_layer(load: Callable[..., Any]) -> Callable[..., Any]:
    """transformers' own loader, a layer at a time: it stacks all experts that it is given, on every rank, before it deals them out."""

    def loaded(model: Any, state_dict: Mapping[str, torch.Tensor], load_config: Any = None) -> tuple[list[str], set[str]]:
        layers: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        for name, tensor in state_dict.items():
            found = LAYER.match(name)
            layers[found[0] if found else ""][name] = tensor
        errors: list[str] = []
        missing: list[set[str]] = []
        for layer in sorted(layers):  # on every rank in the same order: it is collective
            wrong, without = load(model, layers.pop(layer), load_config)
            errors += wrong
            missing.append(without)
        return errors, set.intersection(*missing) if missing else set(model.state_dict())

    return loaded


def _by_whole_shapes(convert: Callable[..., Any]) -> Callable[..., Any]:
    """transformers' operation transposes weights whose shape is not the parameter's, which is empty on ranks that have a shard of it."""

    def converted(self: Any, *args: Any, model: Any, **given: Any) -> Any:
        whole = SimpleNamespace(get_parameter=lambda name: torch.empty(model.get_parameter(name).ds_shape, device="meta"))
        return convert(self, *args, model=whole, **given)

    return converted
