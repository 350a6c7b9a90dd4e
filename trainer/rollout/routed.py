"""Which experts vLLM's routers choose, as records that travel with answers.

On GPUs vLLM returns them (`enable_return_routed_experts`), by its second model runner, which does not run on CPUs. There they are kept
here, by vLLM's own hooks: for each place in the cache of keys and values, the experts of the token that was read into it. So a token that
is found in the cache has the record of the one that was read, and one that is read anew gets another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig
from vllm import EngineArgs
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import RoutedExpertsCaptureSource, bind_routed_experts_capturer
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, UniformTypeKVCacheSpecs

from trainer.configs.rollout import has_experts
from trainer.errors import ConfigError
from trainer.models.routers import DENSE

DROPPED = 0  # the block that vLLM lists for tokens that are out of all windows, and no longer cached


class ExpertRecorder:
    """Mixed into vLLM's worker, by which it is called once the engine is up."""

    model_runner: Any
    vllm_config: Any

    def expert_layers(self) -> list[int]:
        """Numbers of the layers with experts."""
        kinds = (MoERunner, RoutedExpertsCaptureSource)
        return sorted({int(module.layer_id) for module in self.model_runner.model.modules() if isinstance(module, kinds)})

    def record_experts(self) -> tuple[list[int], int]:
        """Begin, on CPUs. Returns `expert_layers` and the group of caches whose blocks `recorded_experts` wants.

        Raises ValueError for a model of whose routers vLLM tells nothing, or that has no attention.
        """
        layers, model = self.expert_layers(), self.vllm_config.model_config
        caches = self.model_runner.kv_cache_config
        specs = [_spec(group.kv_cache_spec) for group in caches.kv_cache_groups]
        found = [i for kind in (FullAttentionSpec, AttentionSpec) for i, spec in enumerate(specs) if isinstance(spec, kind)]
        if not found:
            raise ValueError("it caches no tokens")
        group = found[0]  # one that keeps all tokens, or else only those of a window
        self._block, self._cached = specs[group].block_size, caches.kv_cache_groups[group].layer_names[0]
        kind = torch.uint8 if model.get_num_experts() < 256 else torch.int16
        shape = caches.num_blocks * self._block, len(layers), model.get_num_experts_per_tok()
        self._experts = torch.full(shape, torch.iinfo(kind).max, dtype=kind)
        self._layers = {layer: place for place, layer in enumerate(layers)}
        bind_routed_experts_capturer(self.model_runner.model, self)  # type: ignore[arg-type]  # which calls `capture` alone
        return layers, group

    def capture(self, layer_id: int, topk_ids: torch.Tensor) -> None:
        """The tokens of a step choose, in the order in which their places in the cache are listed."""
        where: Any = get_forward_context().slot_mapping
        if isinstance(where, dict) and self._cached in where:  # else vLLM tries itself
            slots = where[self._cached][: len(topk_ids)]
            known = slots >= 0  # what fills a step up has no place
            self._experts[slots[known], self._layers[layer_id]] = topk_ids[: len(slots)][known].to(self._experts.dtype)

    def recorded_experts(self, blocks: list[int], begin: int, end: int) -> np.ndarray:
        """Of the tokens from `begin` to `end` of a request that has these blocks."""
        at = torch.arange(begin, end)
        blocks_n = torch.tensor(blocks, dtype=torch.int64)[at // self._block]
        found = self._experts[blocks_n * self._block + at % self._block]
        found[blocks_n == DROPPED] = torch.iinfo(found.dtype).max
        return found.numpy()


def _spec(spec: Any) -> Any:
    """Of a group of caches, which may have one for each layer, all of a kind."""
    return next(iter(spec.kv_cache_specs.values())) if isinstance(spec, UniformTypeKVCacheSpecs) else spec


class ExpertsInAnswers:
    """In the place of vLLM's own connector for such outputs, whose methods its scheduler calls."""

    def __init__(self, llm: Any, scheduler: Any, group: int):
        self.llm, self.scheduler, self.group = llm, scheduler, group

    def build_connector_meta(self, *_: Any) -> None:
        """Workers need none: they see where tokens are."""

    def take_output(self, request: Any, _: Any) -> np.ndarray | None:
        """All of a request that has ended, whose blocks are its own until this returns."""
        if not request.is_finished():
            return None
        blocks = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)[self.group]
        begin = request.sampling_params.routed_experts_prompt_start
        return self.llm.collective_rpc("recorded_experts", args=(list(blocks), begin, request.num_tokens - 1))[0]

    def request_finished(self, request: Any) -> None:
        """Nothing is kept of a request."""

    def reset(self) -> None:
        """Tokens that are read anew are recorded anew."""


class Experts:
    """What an engine knows of its routers: whether they are recorded, and how vLLM returns them."""

    def __init__(self, setting: str, model_path: str):
        """`setting`: rollout.router_replay. Raises ConfigError where it asks for what the model has not."""
        self.setting, self.why = setting, "rollout.router_replay=off"
        self.kept: list[int] | None = None  # layers, of all that vLLM returns, that have experts
        if setting != "off":
            config = AutoConfig.from_pretrained(model_path).get_text_config()
            self.why = ""
            if not has_experts(config.to_dict()):
                self.without(f"{config.model_type} {DENSE}")

    def without(self, why: str) -> None:
        """Raises ConfigError where they are required."""
        if self.setting == "required":
            raise ConfigError(f"rollout.router_replay=required: {why}; use off")
        self.why = why

    def arguments(self, given: dict[str, Any], on_cpu: bool) -> dict[str, Any]:
        """Of `vllm.LLM`, besides those that are `given`."""
        if self.why or on_cpu:
            return {}
        more: dict[str, Any] = {"enable_return_routed_experts": True}
        try:
            EngineArgs(**given, **more).create_engine_config()
        except ValueError as error:
            self.without(f"vLLM returns no experts: {_last_line(error)}")
            return {}
        return more

    @contextmanager
    def starting(self) -> Iterator[None]:
        """While the engine starts: some kernels turn out only then to tell nothing of their routers. Raises ConfigError for these."""
        try:
            yield
        except ValueError as error:
            if "outed-experts" not in str(error):
                raise
            raise ConfigError(f"rollout.router_replay={self.setting}: {_last_line(error)}; use off") from error

    def started(self, llm: Any, scheduler: Any, on_cpu: bool) -> None:
        """Once the engine is up. Raises ConfigError where its experts are required and not to be had."""
        if self.why:
            return
        if not on_cpu:
            self.kept = llm.collective_rpc("expert_layers")[0]
            return
        try:
            _, group = llm.collective_rpc("record_experts")[0]
        except ValueError as error:
            self.without(f"vLLM returns no experts: {_last_line(error)}")
            return
        scheduler.aux_output_connector = ExpertsInAnswers(llm, scheduler, group)

    def of(self, answer: Any) -> np.ndarray | None:
        """What vLLM says that an answer's tokens took, in the type that records have."""
        found = answer.routed_experts
        if found is None or self.kept is None:
            return found
        layers = found[:, self.kept]
        return layers.astype(np.int16) if layers.dtype == np.uint16 or layers.max(initial=0) == 255 else layers


def _last_line(error: Exception) -> str:
    """pydantic's errors have the reason in one of several lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("Value error, ")]
    return (told or lines or [type(error).__name__])[0].removeprefix("Value error, ").split(" [type=")[0].rstrip(".")
