"""LoRA: low-rank adapters that are trained in place of a model's weights, by peft (Hu et al., 2021, https://arxiv.org/abs/2106.09685).

A linear layer with weight W gets A [rank, in] and B [out, rank], and computes (W + alpha / rank * B A) x. The adapters are put into the
transformers model itself, whose own weights are frozen: what reads trainable parameters alone reads adapters.
"""

from __future__ import annotations

import difflib
import inspect
import json
import logging
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import torch
from safetensors.torch import save
from torch import nn

from trainer.configs.sections import LoraConfig
from trainer.errors import ConfigError

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # which peft imports; on a CPU it warns of a kernel of the hub's

HEAD = "score"  # of a classifier: new, so trained as a whole beside its adapters
FOLDER = "adapter"  # of a model's folder: the adapters alone, as peft reads them
A, B, BASE = ".lora_A.default.weight", ".lora_B.default.weight", ".base_layer"


def add(lm: Any, lora: LoraConfig, seed: int) -> None:
    """Freeze the model, but for a classifier's head, and add adapters in place: A drawn from `seed`, whatever was drawn before, and B zero.

    Raises ConfigError for targets that are no linear layers of it.
    """
    import peft

    settings = peft_config(lora, [f"lm.{name}" for name in _targets(lm, lora)], None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(settings, nn.ModuleDict({"lm": lm}))  # of a transformers model it would change the targets
    if (head := getattr(lm, HEAD, None)) is not None:
        head.requires_grad_(True)


def peft_config(lora: LoraConfig, targets: list[str] | str, base: str | None, *, classifier: bool = False) -> Any:
    """What peft, and vLLM, know of the adapters of the layers `targets`; `base` is where the model that they belong to lies."""
    import peft

    assert lora.rank is not None
    return peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # peft divides it by the rank
        target_modules=targets,
        task_type="SEQ_CLS" if classifier else "CAUSAL_LM",
        modules_to_save=[HEAD] if classifier else None,
        base_model_name_or_path=base,
    )


def _targets(lm: Any, lora: LoraConfig) -> list[str]:
    """Names of the layers that get adapters: of all that may but the head, or of those asked for."""
    modules = {name: module for name, module in lm.named_modules() if name}
    head = getattr(lm, HEAD, None) or lm.get_output_embeddings()
    linear = [name for name, module in modules.items() if _is_linear(module) and module is not head]
    without = _without(lm, linear)
    allowed = [name for name in linear if name not in without]
    known = list(dict.fromkeys(name.rpartition(".")[2] for name in allowed))
    kind = lm.config.model_type
    if not allowed:
        raise ConfigError(f"model.lora.rank={lora.rank}: {kind} has no linear layers except its head; adapters need some")
    if lora.targets is None:
        return allowed
    chosen: list[str] = []
    for target in lora.targets:
        found = [name for name in modules if name == target or name.endswith(f".{target}")]
        near = difflib.get_close_matches(target, known, n=1)
        hint = f"did you mean {near[0]}? It has" if near else "it has"
        if not found:
            raise ConfigError(f"model.lora.targets: {kind} has no {target}; {hint} {', '.join(known)}")
        if not set(found) <= set(linear):
            raise ConfigError(f"model.lora.targets: {target} is not a linear layer below the head; allowed are {', '.join(known)}")
        if lost := [name for name in found if name in without]:
            raise ConfigError(f"model.lora.targets: {target}: {without[lost[0]]}; allowed in {kind} are {', '.join(known)}")
        chosen += found
    return list(dict.fromkeys(chosen))


def _is_linear(module: nn.Module) -> bool:
    """Some of a family's own kinds return something else: Llama 4's routers, grouped layers of DeepSeek-V4. Tried without their weights."""
    if not isinstance(module, nn.Linear) or not type(module).__module__.startswith("transformers.models."):
        return isinstance(module, nn.Linear)
    size = (module.out_features, module.in_features)
    weights = {name: torch.empty(size if name == "weight" else size[:1], device="meta") for name, _ in module.named_parameters()}
    try:
        found = torch.func.functional_call(module, weights, (torch.empty(1, 2, module.in_features, device="meta"),))
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return False
    return isinstance(found, torch.Tensor) and found.shape == (1, 2, module.out_features)


def _without(lm: Any, linear: list[str]) -> dict[str, str]:
    """Linear layers whose adapters would not be learned, or not be read again, and why."""
    import peft
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    found: dict[str, str] = {}
    for name in linear:
        parent, _, last = name.rpartition(".")
        if f"self.{last}.weight" in _source(type(lm.get_submodule(parent))):
            found[name] = "the model reads its weight by itself, past adapters"
    for last in {name.rpartition(".")[2] for name in linear}:
        settings = peft.LoraConfig(target_modules=[last])
        try:
            convert_peft_config_for_transformers(settings, lm, None)
            kept = last in (settings.target_modules or ())
        except ValueError:  # one of several that it would change together
            kept = False
        if not kept:
            why = "peft reads adapters of this name as those of experts, which get none here"
            found |= {name: why for name in linear if name.rpartition(".")[2] == last}
    return found


@cache
def _source(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):  # code without a file
        return ""


def merged(name: str, weight: torch.Tensor, adapters: Mapping[str, torch.Tensor], lora: LoraConfig) -> tuple[str, torch.Tensor]:
    """A frozen parameter under its Hugging Face name, with what its adapters add to it, if it has any; summed in float32."""
    layer = name.removesuffix(f"{BASE}.weight")
    if layer == name:
        return name.replace(f"{BASE}.", "."), weight
    assert lora.rank is not None
    delta = adapters[layer + B].float() @ adapters[layer + A].float() * (lora.alpha / lora.rank)
    return f"{layer}.weight", (weight.float() + delta).to(weight.dtype)


def exported(
    frozen: Iterable[tuple[str, torch.Tensor]], adapters: Mapping[str, torch.Tensor], lora: LoraConfig, base: str | None
) -> tuple[dict[str, torch.Tensor], dict[str, bytes]]:
    """The weights of the merged model, and the files of the adapters alone. A classifier's head is in both."""
    head = {name: tensor for name, tensor in adapters.items() if name.startswith(f"{HEAD}.")}
    return dict(merged(name, weight, adapters, lora) for name, weight in frozen) | head, files(adapters, lora, base)


def files(adapters: Mapping[str, torch.Tensor], lora: LoraConfig, base: str | None) -> dict[str, bytes]:
    """A folder that `peft.PeftModel.from_pretrained` and vLLM load, by the names of its files."""
    classifier = any(name.startswith(f"{HEAD}.") for name in adapters)
    targets = [name.removesuffix(A) for name in adapters if name.endswith(A)]
    settings = peft_config(lora, targets, base, classifier=classifier).to_dict() | {"inference_mode": True}
    return {
        f"{FOLDER}/adapter_config.json": json.dumps(settings, indent=2, sort_keys=True, default=sorted).encode(),
        f"{FOLDER}/adapter_model.safetensors": save({name: tensor.contiguous() for name, tensor in in_peft(adapters).items()}),
    }


def in_peft(adapters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Under the names of peft's files."""
    return {f"base_model.model.{name.replace('.default.', '.')}": tensor for name, tensor in adapters.items()}
