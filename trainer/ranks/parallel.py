"""Matrices and experts over ranks, by DeepSpeed's AutoTP and AutoEP: what it is asked for, and the whole of each tensor that it has cut.

https://www.deepspeed.ai/docs/config-json/. The mesh is data x sequence x tensor, the last of them consecutive ranks. Experts lie over
`trainer.expert_parallel` consecutive ranks, whatever those share besides: each sends its tokens to the ranks that have their experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainer.configs.sections import TrainerConfig
from trainer.data.packing import Sequence, pack
from trainer.episodes import Batch
from trainer.errors import ConfigError
from trainer.models import dimensions
from trainer.models.heads import backbone, hidden_states

TENSOR, EXPERT = "trainer.tensor_parallel", "trainer.expert_parallel"
CUT = {"colwise": "column", "rowwise": "row"}  # from transformers' plan for a model to DeepSpeed's words
SUMMED = "replicated_with_grad_allreduce"  # norms of heads, which each rank has some of
ALIKE = {"olmoe": "qwen3_moe", "glm4_moe": "deepseek_v3", "qwen3_next": "qwen3_5_moe"}
WHOLE = ("lm_head", "embed_tokens")  # no rank has a part of them: losses read whole logits
EXPERTS = ".mlp.experts"  # of a plan, which AutoEP owns
PLACES = {  # of tensors in transformers' blocks, or how their names begin, and in DeepSpeed's layer
    "experts.gate_up_proj": ("experts.w1", "experts.w3"),
    "experts.down_proj": ("experts.w2",),
    "gate.weight": ("router.gate.weight",),
    "gate.e_score_correction_bias": ("router.e_score_correction_bias",),
    "shared_expert.": ("shared_experts.",),
    "shared_expert_gate.": ("shared_experts_gate.",),
}
LENGTHS = 9, 7  # tokens of two sequences that a model is tried with
MOST = {torch.float32: 1e-4}  # of the size of hidden states, which are summed in another order; and of other types:
MOST_ROUNDED = 0.1


def home(trainer: TrainerConfig, sharded: bool, device: torch.device) -> torch.device:
    """Where a model is loaded: whole, it may not fit on the device of a rank that gets a part of it, which DeepSpeed moves there."""
    return torch.device("cpu") if trainer.cut and not sharded else device


def settings(model: Any, trainer: TrainerConfig, device: torch.device) -> dict[str, Any]:
    """Of DeepSpeed, for `model`, whose `lm` is a language model as it was loaded, and which is for `device`.

    Raises ConfigError for one that cannot be cut so.
    """
    blocks: dict[str, Any] = {}
    if not trainer.cut:
        return blocks
    lm, inside = model.lm, "lm"
    model.config = lm.config  # where DeepSpeed looks for heads and groups of experts
    if trainer.expert_parallel > 1:
        from deepspeed.module_inject.auto_ep_presets.registry import PRESET_MODELS

        preset = _preset(lm, trainer.expert_parallel)
        blocks["expert_parallel"] = {
            "enabled": True,
            "autoep_size": trainer.expert_parallel,
            "preset_model": preset,
            "moe_layer_pattern": rf"{inside}\.{PRESET_MODELS[preset].moe_layer_pattern}",
            "use_grouped_mm": device.type == "cuda",
        }
    if trainer.tensor_parallel > 1:
        plan = _plan(lm, trainer)
        specs = [
            {"patterns": [_pattern(inside, name)], "partition_type": CUT.get(style, "skip"), "grad_allreduce": style == SUMMED}
            for name, style in plan.items()
        ]
        blocks["tensor_parallel"] = {
            "autotp_size": trainer.tensor_parallel,
            "partition_config": {"layer_specs": specs, "use_default_specs": False},
        }
    return blocks


def _pattern(inside: str, name: str) -> str:
    return re.escape(f"{inside}.{name}").replace(r"\*", r"\d+") + r"\.weight$"


def fitting(lm: Any, trainer: TrainerConfig) -> TrainerConfig:
    """For another model beside the policy, such as a teacher, which may have no experts to spread."""
    spread = trainer.expert_parallel > 1 and not _experts(lm)
    return trainer.model_copy(update={"expert_parallel": 1}) if spread else trainer


def _experts(lm: Any) -> int:
    """Of a layer, in transformers' own layout."""
    found = (getattr(parameter, "ds_shape", parameter.shape) for name, parameter in lm.named_parameters() if ".experts." in name)
    return int(next(iter(next(found, ())), 0))


def _plan(lm: Any, trainer: TrainerConfig) -> dict[str, str]:
    """Of transformers, for the layers of the model: how each matrix is cut."""
    size, config = trainer.tensor_parallel, lm.config.get_text_config()
    kind = config.model_type
    plan = {name: style for name, style in lm.tp_plan.items() if name.rpartition(".")[2] not in WHOLE}
    plan = {name: style for name, style in plan.items() if EXPERTS not in name}
    if trainer.expert_parallel == 1 and _experts(lm):
        raise ConfigError(f"{TENSOR}={size}: {kind} has experts, which are not cut as matrices; set {EXPERT} too, or use 1")
    if not plan:
        raise ConfigError(f"{TENSOR}={size}: transformers has no plan for the layers of {kind}; use 1")
    if others := {*plan.values()} - {*CUT, SUMMED}:
        raise ConfigError(f"{TENSOR}={size}: transformers cuts {kind} as {', '.join(sorted(others))}, which DeepSpeed cannot; use 1")
    for layer in dict.fromkeys(dimensions.layers(config)):
        if layer.heads % size or layer.pairs % size:
            heads = f"{layer.heads} attention heads, {layer.pairs} of keys and values"
            raise ConfigError(f"{TENSOR}={size}: {kind} has {heads}; both must divide by it")
    return plan


def _preset(lm: Any, size: int) -> str:
    """DeepSpeed's name for a kind of experts that it knows."""
    from deepspeed.module_inject.auto_ep_presets.registry import available_preset_names, preset_name_for_hf_model_type

    kind = lm.config.get_text_config().model_type
    experts = _experts(lm)
    if not experts:
        raise ConfigError(f"{EXPERT}={size}: {kind} has no experts; use 1")
    preset = preset_name_for_hf_model_type(kind) or ALIKE.get(kind)
    if preset is None:
        known = ", ".join(available_preset_names())
        raise ConfigError(f"{EXPERT}={size}: DeepSpeed does not know the experts of {kind}; it knows {known}; use 1")
    if experts % size:
        raise ConfigError(f"{EXPERT}={size}: {kind} has {experts} experts, which do not divide by it")
    return preset


@dataclass(frozen=True)
class Whole:
    """A tensor as the model had it before it was cut, and what of it this rank has."""

    shape: tuple[int, ...]
    parts: tuple[torch.Tensor, ...]  # one after another on axis 1: of experts, the gates and what they gate
    group: Any  # whose members have the rest of it

    def gather(self, rows: slice | None = None) -> torch.Tensor:
        """All of it, or these rows of axis 0, in memory of its own. Collective over `group`."""
        size = [*self.parts[0].shape]
        if len(self.parts) > 1:
            size[1] = sum(part.size(1) for part in self.parts)
        axis = next((axis for axis, (all_of, some) in enumerate(zip(self.shape, size, strict=True)) if all_of != some), None)
        if axis is None:
            return self._mine(rows or slice(None)).clone()
        if rows is not None:
            return self._of(rows)
        mine = self._mine(slice(None)).movedim(axis, 0).contiguous()
        whole = mine.new_empty((self.shape[axis], *mine.shape[1:]))
        dist.all_gather([*whole.unflatten(0, (-1, mine.size(0)))], mine, group=self.group)
        return whole.movedim(0, axis)  # not contiguous, so that there is no copy of it

    def _mine(self, rows: slice) -> torch.Tensor:
        """These rows of what this rank has, without copying more."""
        some = [part.detach() if rows == slice(None) else part.detach()[rows] for part in self.parts]
        return torch.cat(some, 1) if len(some) > 1 else some[0]

    def _of(self, rows: slice) -> torch.Tensor:
        """Rows of experts, each sent by the rank that has it: no rank has others than these besides its own."""
        count, me, pieces = self.parts[0].size(0), dist.get_rank(self.group), []
        for owner in range(rows.start // count, (rows.stop - 1) // count + 1):
            here = slice(max(rows.start - owner * count, 0), min(rows.stop - owner * count, count))
            shape = (here.stop - here.start, *self.shape[1:])
            piece = self._mine(here).contiguous() if owner == me else self.parts[0].new_empty(shape)
            dist.broadcast(piece, dist.get_global_rank(self.group, owner), group=self.group)
            pieces.append(piece)
        return torch.cat(pieces)


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Of all parameters and buffers, by name, however ZeRO-3 has sharded them."""
    return {name: tuple(getattr(tensor, "ds_shape", tensor.shape)) for name, tensor in _tensors(model).items()}


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def wholes(model: nn.Module, before: Mapping[str, tuple[int, ...]], trainer: TrainerConfig) -> dict[str, Whole]:
    """By the names of `before`, the shapes that the model had before DeepSpeed cut it."""
    from deepspeed.utils import groups

    now = _tensors(model)
    tensor_group = groups.get_tensor_model_parallel_group() if trainer.tensor_parallel > 1 else None
    expert_group = groups._get_expert_parallel_group(f"ep_size_{trainer.expert_parallel}") if trainer.expert_parallel > 1 else None
    found = {}
    for name, shape in before.items():
        own = (name,) if name in now else places(name)
        if not all(part in now for part in own):
            raise ConfigError(f"{EXPERT}: DeepSpeed has moved {name}, which a weight sync needs; use 1")
        found[name] = Whole(shape, tuple(now[part] for part in own), expert_group if ".experts.w" in own[0] else tensor_group)
    return found


def places(name: str) -> tuple[str, ...]:
    """Where DeepSpeed's layer has what transformers gives this name in a mixture of experts; of several, one after another on axis 1."""
    path, _, rest = name.rpartition(".mlp.")
    for theirs, ours in PLACES.items():
        if rest.startswith(theirs):
            return tuple(f"{path}.mlp.{place}{rest.removeprefix(theirs)}" for place in ours)
    return (name,)


@contextmanager
def gathered(lm: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, a model that is in no engine yet computes on `device`, sharded or in CPU memory as it is: each module has its own weights
    there while it computes, and those of its smallest parts, which some read without calling them."""
    hooks: list[Any] = []
    open_: dict[nn.Module, Any] = {}

    def enter(module: nn.Module, *_: Any) -> None:
        own = [each for each in (module, *module.children()) if each is module or not [*each.children()]]
        open_[module] = _there([p for each in own for p in each.parameters(recurse=False)], device)
        open_[module].__enter__()

    def leave(module: nn.Module, *_: Any) -> None:  # what a hook returns would be the module's output
        open_.pop(module).__exit__(None, None, None)

    for module in lm.modules():
        if [*module.children()] and any(hasattr(p, "ds_id") or p.device != device for p in module.parameters()):
            hooks.append(module.register_forward_pre_hook(enter))
            hooks.append(module.register_forward_hook(leave))
    for buffer in lm.buffers():
        buffer.data = buffer.to(device)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _there(parameters: list[nn.Parameter], device: torch.device) -> Iterator[None]:
    """Inside, parameters are whole and on `device`."""
    import deepspeed

    homes = [(each, each.data) for each in parameters if not hasattr(each, "ds_id")]
    for each, home in homes:
        each.data = home.to(device)
    with deepspeed.zero.GatheredParameters(parameters):
        yield
    for each, home in homes:
        each.data = home


@torch.no_grad()
def hidden(compute: Callable[[Batch], Any], lm: Any, device: torch.device) -> torch.Tensor:
    """The hidden states of `lm`, which `compute` runs, of two sequences, one row each (2, L, D). Collective where it is cut or sharded."""
    vocabulary = lm.config.get_text_config().vocab_size
    texts = [[(start + 5 * i) % vocabulary for i in range(length)] for start, length in enumerate(LENGTHS, 1)]
    [batch] = pack([Sequence(ids, ids[:1]) for ids in texts], 2 * max(LENGTHS), pad_id=0, one_row=False, alone=True)
    found: list[torch.Tensor] = []
    hook = backbone(lm).register_forward_hook(lambda _, __, output: found.append(output.last_hidden_state))
    try:
        compute(batch.to(device))
    finally:
        hook.remove()
    return torch.cat([found[0][row, :length] for row, length in enumerate(LENGTHS)])


def whole(lm: Any, device: torch.device) -> torch.Tensor:
    """What `hidden` gives of a model that is in no engine yet."""
    with gathered(lm, device):
        return hidden(partial(hidden_states, lm), lm, device)


def difference(before_LD: torch.Tensor, after_LD: torch.Tensor) -> float:
    """Between hidden states of a whole model and of the same one cut, relative to their size and beyond what may be rounding; else 0."""
    found = float((after_LD.float() - before_LD.float()).norm() / before_LD.float().norm())
    return found if not found <= MOST.get(before_LD.dtype, MOST_ROUNDED) else 0.0
