"""Moves what a DeepSpeed engine keeps on its device to CPU memory and back, between optimizer steps.

https://deepspeed.readthedocs.io/en/latest/zero3.html#offload-states
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trainer.models import quantize


def to_cpu(engine: Any, device: torch.device) -> None:
    """Weights, gradients and optimizer state. `device` is the engine's."""
    pinned = device.type == "cuda"
    if engine.zero_optimization_partition_weights():
        from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as State

        # DeepSpeed moves the optimizer's part in stage 3 only for its own Adam, which has to be compiled.
        engine.offload_states(include=[State.lp_params, State.lp_grads, State.contiguous_grad_buffer], pin_memory=pinned)
        _move_stage_3(engine, torch.device("cpu"))
    elif hasattr(engine.optimizer, "offload_states"):
        engine.offload_states(pin_memory=pinned)
        _move_frozen(engine, torch.device("cpu"))
    else:
        _move(engine, torch.device("cpu"))
    if pinned:
        torch.cuda.empty_cache()


def back(engine: Any, device: torch.device) -> None:
    """What `to_cpu` moved."""
    if engine.zero_optimization_partition_weights():
        _move_stage_3(engine, device)
        engine.reload_states()
    elif hasattr(engine.optimizer, "offload_states"):
        engine.reload_states()
        _move_frozen(engine, device)
    else:
        _move(engine, device)


def _move_frozen(engine: Any, device: torch.device) -> None:
    """The weights below adapters: in stages 1 and 2 DeepSpeed moves only what its optimizer has."""
    for parameter in engine.module.parameters():
        if not parameter.requires_grad:
            quantize.move(parameter, device)


def _move_stage_3(engine: Any, device: torch.device) -> None:
    if engine.zero_use_cpu_optimizer():  # trainer.offload_optimizer: it is in CPU memory all the time
        return
    for flat in engine.optimizer.fp32_partitioned_groups_flat:
        flat.data = flat.data.to(device)
    move_state(engine.optimizer.optimizer, device)


def _move(engine: Any, device: torch.device) -> None:
    optimizer = engine.optimizer
    if optimizer is None or isinstance(optimizer, torch.optim.Optimizer):  # configs/ppo.py refuses others on GPUs
        move(engine.module, device)
        move_state(optimizer, device)


def move(model: nn.Module, device: torch.device) -> None:
    """A model that is not sharded, and its gradients, in place: who holds its parameters keeps them."""
    for parameter in model.parameters():
        quantize.move(parameter, device)
        if parameter.grad is not None:
            parameter.grad.data = parameter.grad.data.to(device)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)


def move_state(optimizer: Any, device: torch.device) -> None:
    for state in optimizer.state.values() if optimizer is not None else ():
        state.update({name: value.to(device) for name, value in state.items() if isinstance(value, torch.Tensor)})
