"""Weights that come to vLLM's workers, which import this file: each of them takes a bucket at a time, in the layout that its kernels want.

https://docs.vllm.ai/en/latest/training/rlhf.html
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from vllm.config import set_current_vllm_config
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform

from trainer import weights
from trainer.chat.tokenizer import sees
from trainer.configs.sections import ModelConfig
from trainer.models import lora
from trainer.models.checkpoint_names import CheckpointNames
from trainer.rollout.layouts import Loading, QuantizedLoading, loading
from trainer.rollout.routed import ExpertRecorder

# The policy's adapters: always the same to vLLM, and given to its workers, so that it has nothing to read at their path.
ADAPTERS = LoRARequest("policy", 1, "weight-sync")


class WeightReceiver(ExpertRecorder):
    """Mixed into vLLM's worker by `worker_extension_cls`; its methods are reached by `collective_rpc`."""

    device: torch.device
    model_runner: Any
    vllm_config: Any
    rank: int
    names: CheckpointNames | None = None  # once weights have come
    loading: Loading | QuantizedLoading | None = None  # while they come

    def connect_weights(self, rendezvous: weights.Rendezvous, first_rank: int, plan: weights.Plan) -> None:
        self.weight_plan = plan
        self.weight_group = weights.join(rendezvous, first_rank + self.rank)

    def receive_weights(self) -> None:
        for bucket in weights.receive(self.weight_group, self.weight_plan, self.device):
            self._take(bucket)
        self._wait_for_copies()

    def load_bucket(self, bucket: weights.Named) -> None:
        self._take([(name, tensor.to(self.device)) for name, tensor in bucket])
        self._wait_for_copies()

    def finish(self, adapters: dict[str, Any] | None) -> None:
        """All have come: of adapters, whose settings these are, or of the model."""
        if adapters:
            self._load_adapters(adapters)
        elif self.loading:
            with set_current_vllm_config(self.vllm_config), self.device:
                self.loading.end()
            self.loading = None
        self._wait_for_copies()

    def spare_transformers(self) -> None:
        """Families that vLLM has no code for, such as OLMo 2, it runs as transformers has them, and changes their classes: of which others
        in this process have models too."""
        for kind in {type(module) for module in self.model_runner.model.modules()}:
            if kind.__module__.startswith("transformers.") and not hasattr(kind, "do_not_compile"):
                setattr(kind, "do_not_compile", True)  # noqa: B010

    def _take(self, bucket: weights.Named) -> None:
        """Weights at once; adapters wait for `finish`, as vLLM takes all together."""
        if self.vllm_config.lora_config is not None:
            self.adapters = {**getattr(self, "adapters", {}), **{name: tensor.clone() for name, tensor in bucket}}
            return
        with set_current_vllm_config(self.vllm_config), self.device:  # which vLLM's layers want, and those of transformers that it changed
            self.names = self.names or CheckpointNames(_without_weights(self.vllm_config.model_config.model))
            self.loading = self.loading or loading(self.model_runner.model, self.vllm_config.model_config)
            self.loading.load([*self.names.restore(bucket)])

    def _load_adapters(self, settings: dict[str, Any]) -> None:
        """Put what has come in place of the adapters before, under their number: requests at work go on with them."""
        manager = self.model_runner.lora_manager
        mapper = getattr(manager._adapter_manager.model, "hf_to_vllm_mapper", None)
        adapters = LoRAModel.from_lora_tensors(
            ADAPTERS.lora_int_id,
            lora.in_peft(self.adapters),
            PEFTHelper.from_dict(settings),
            device=str(self.device),
            dtype=manager.lora_config.lora_dtype,
            weights_mapper=mapper and mapper.get_rename_mapper(),
        )
        manager.remove_adapter(adapters.id)
        manager._adapter_manager.add_adapter(adapters)
        manager._adapter_manager.activate_adapter(adapters.id)
        self.adapters = {}

    def _wait_for_copies(self) -> None:
        """The buffers may be reused once this returns."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def _without_weights(path: str) -> Any:
    """The model as transformers has it."""
    with torch.device("meta"):
        kind: Any = AutoModelForImageTextToText if sees(ModelConfig(path=path)) else AutoModelForCausalLM
        return kind.from_config(AutoConfig.from_pretrained(path))


def keep_linear_weights() -> None:
    """Leave Linear weights as they are on CPUs.

    vLLM packs them for its CPU kernels at load and drops the originals; `load_weights` then has nothing to write into, and its
    `reload_weights` misses a tied output head. Without packing both are right.
    """
    import vllm.model_executor.layers.utils as layers
    from vllm import _custom_ops

    _custom_ops._supports_onednn = False
    layers.check_cpu_sgl_kernel = lambda *_: False


if current_platform.is_cpu():
    keep_linear_weights()  # at import: the workers of a split rollout engine are processes that import this file alone
