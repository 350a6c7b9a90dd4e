"""What knows DeepSpeed, with `offload`: a model, its optimizer and schedule, sharded as the ZeRO stage says.

https://deepspeed.readthedocs.io/en/latest/initialize.html
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, MutableMapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from trainer.checkpoints.background import Memory, snapshot
from trainer.cluster.spans import span
from trainer.configs.sections import DivergenceConfig, OptimConfig, TrainerConfig
from trainer.models.checkpoint_names import rows_of
from trainer.ranks import offload, parallel
from trainer.ranks.universal import reading


def init_distributed(rank: int, world: int, address: str, port: int, timeout: int, device: torch.device) -> None:
    """Join the process group of one role: NCCL on GPUs, gloo on CPUs. Returns once all `world` ranks are there, or raises."""
    os.environ.update(environment(rank, world, address, port, device))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    import deepspeed

    backend = "nccl" if device.type == "cuda" else "gloo"
    # DeepSpeed's shared-memory all-reduce for CPUs is compiled at its first use (48 s, and a C++ compiler); gloo does the same work.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    with quiet():
        deepspeed.init_distributed(dist_backend=backend, timeout=timedelta(seconds=timeout), auto_mpi_discovery=False)


def record_apart(role: str, env: MutableMapping[str, str]) -> None:
    """PyTorch's flight recorder names its files by rank, which the ranks of all roles share: each role gets a folder."""
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        if file := env.get(name):
            folder = Path(file).parent / role
            with contextlib.suppress(OSError):  # the node agent has warned of it; a run does without dumps
                folder.mkdir(parents=True, exist_ok=True)
                env[name] = str(folder / Path(file).name)


def environment(rank: int, world: int, address: str, port: int, device: torch.device) -> dict[str, str]:
    """What DeepSpeed reads. All of it is set, or DeepSpeed looks for an MPI launcher; LOCAL_RANK is the index of the device."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(device.index or 0),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "DS_ACCELERATOR": device.type,  # read once, at DeepSpeed's import; it would take a GPU wherever there is one
    }


def configuration(dtype: torch.dtype, stage: int) -> dict[str, Any]:
    """https://www.deepspeed.ai/docs/config-json/

    Gradients are summed in float32, whatever the model's type: a bfloat16 sum over hundreds of micro-batches is off by percents.
    """
    return {
        "train_micro_batch_size_per_gpu": 1,  # only reported by DeepSpeed; micro-batches are cut by tokens
        "gradient_accumulation_steps": 1,
        "steps_per_print": 10**9,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


class Engine:
    """DeepSpeed's engine with the calls that a training step needs.

    `steps` is the number of optimizer steps that the learning-rate schedule spans, of which the first `held` have a learning rate of 0.

    Losses given to `backward` are sums already divided by the global count, so gradients are *summed* over micro-batches and ranks:
    the result does not depend on how the batch was cut.
    """

    def __init__(
        self,
        model: nn.Module,
        optim: OptimConfig | None,
        trainer: TrainerConfig,
        steps: int,
        device: torch.device,
        divergence: DivergenceConfig = DivergenceConfig(),  # noqa: B008  # frozen
        held: int = 0,
    ):
        import deepspeed

        self.world = torch.distributed.get_world_size() // trainer.tensor_parallel
        self.optim, self.device = optim, device
        self.memory, self.copied, self.timeout = Memory(), threading.Event(), trainer.timeout
        self.copied.set()
        self.away = False  # its states are in CPU memory, see `offload`
        self.trained = {name for name, p in model.named_parameters() if p.requires_grad}
        shapes = parallel.shapes(model) if trainer.cut else {}
        self.frozen = len(self.trained) < len(list(model.parameters()))
        self.limit = math.inf if divergence.grad_norm is None else divergence.grad_norm
        dtype = next(model.parameters()).dtype
        stage = _stage(dtype, optim, trainer)
        config = configuration(dtype, stage) | parallel.settings(model, trainer, device)
        arguments: dict[str, Any] = {"model": model, "config": config}
        if optim is not None:
            config["gradient_clipping"] = optim.grad_clip if stage else 0.0
            if trainer.offload_optimizer:
                config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": device.type == "cuda"}
            arguments |= {  # made once the model is cut
                "optimizer": lambda _: _optimizer(model, optim, trainer),
                "lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, schedule(optim, steps, held)),
            }
        for module in model.modules():  # https://deepspeed.readthedocs.io/en/latest/zero3.html#registering-external-parameters
            for parameter in getattr(module, "borrowed", ()):
                deepspeed.zero.register_external_parameter(module, parameter)
        with quiet():
            self.engine, *_ = deepspeed.initialize(**arguments)
        if trainer.tensor_parallel > 1:  # would send the first micro-batch around, and cannot compare its type; ranks are dealt the same
            cast("Any", self.engine).first_dataloader_check.remove()
        self.wholes = parallel.wholes(self.model, shapes, trainer) if trainer.cut else None
        # Only float32 without ZeRO: DeepSpeed leaves the optimizer as it is, and would clip without telling the norm.
        self.clip = optim.grad_clip if optim is not None and isinstance(self.engine.optimizer, torch.optim.Optimizer) else None

    @property
    def model(self) -> nn.Module:
        return cast("nn.Module", self.engine.module)

    def __call__(self, *args: Any) -> Any:
        return self.engine(*args)

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Accumulate gradients; `last` marks the step's last micro-batch, after which ranks are reduced."""
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss * self.world)  # DeepSpeed divides the sum over ranks by their number

    def step(self) -> dict[str, float]:
        """Clip, update, advance the schedule; or skip all of it where the gradient is not finite or above the limit.

        Waits until `save_state` has copied. Returns the gradient's norm before clipping, the learning rate just used, and 1
        as `skipped` where it was not.
        """
        self._until_copied()
        lr = self.engine.get_lr()[0]
        if self.clip is not None:
            norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip))
            skipped = not (math.isfinite(norm) and norm <= self.limit)
            if skipped:
                self.model.zero_grad()
            else:
                self.engine.step()
        else:
            with _skipping_above(self.limit) as norms:
                self.engine.step()
            skipped = not self.engine.was_step_applied()
            norm = norms[0] if norms and norms[0] >= 0 else math.inf  # DeepSpeed has no norm, or -1, of what is not finite
        return {"grad_norm": norm, "lr": lr, "skipped": float(skipped)}

    def offload(self) -> None:
        """Move weights, gradients and optimizer state to CPU memory until `reload`; nothing is done where they are there.

        Waits until `save_state` has copied.
        """
        if self.away:
            return
        self._until_copied()
        offload.to_cpu(self.engine, self.device)
        self.away = True

    def reload(self) -> None:
        """Take back what `offload` moved."""
        if not self.away:
            return
        offload.back(self.engine, self.device)
        self.away = False

    def _until_copied(self) -> None:
        with span("wait for the checkpoint"):
            copied = self.copied.wait(self.timeout)
        if not copied:
            raise TimeoutError(f"the checkpoint was not copied to memory within {self.timeout} s (trainer.timeout)")

    def weights(self, names: list[str]) -> list[torch.Tensor]:
        """Whole parameters and buffers by name. Collective where they are cut or sharded: every rank asks for the same in turn."""
        import deepspeed

        if self.wholes is not None:
            chosen = [(self.wholes[name], rows) for name, rows in map(rows_of, names)]
            parts = list({id(part): part for whole, _ in chosen for part in whole.parts if hasattr(part, "ds_id")}.values())
            with deepspeed.zero.GatheredParameters(parts) if parts else contextlib.nullcontext():
                return [whole.gather(rows) for whole, rows in chosen]
        table = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        found = [(table[name], rows) for name, rows in map(rows_of, names)]
        if not self.sharded:
            return [tensor.detach() if rows is None else tensor.detach()[rows] for tensor, rows in found]
        with deepspeed.zero.GatheredParameters(list({id(t): t for t, _ in found if hasattr(t, "ds_id")}.values())):
            return [(tensor.detach() if rows is None else tensor.detach()[rows]).clone() for tensor, rows in found]

    @property
    def sharded(self) -> bool:
        """Whether parameters themselves are partitioned (ZeRO-3)."""
        return self.engine.zero_optimization_partition_weights()

    def save_state(self, folder: Path, at_once: bool = False) -> list[Callable[[], None]]:
        """Begin to write this rank's shards of weights, optimizer and schedule below `folder`. Collective.

        Returns calls for another thread to make in their order while training goes on: the first copies the shards to CPU memory, which
        the next `step` waits for. Nothing is left to do if `at_once`. What was returned before must be done: its memory is used again.
        """
        writes: list[Callable[[], None]] = []
        files: Any = self.engine.checkpoint_engine
        self.memory.reuse()
        write = files.save

        def copy_or_write(state_dict: dict[str, Any], path: str) -> None:
            state = self._without_frozen(state_dict)
            if at_once:
                write(state, path)
            else:
                writes.append(partial(write, snapshot(state, self.memory), path))

        files.save = copy_or_write
        try:
            with quiet():
                self.engine.save_checkpoint(str(folder), tag="engine", save_latest=False, exclude_frozen_parameters=self.frozen)
        finally:
            files.save = write
        if at_once:
            return []
        self.copied.clear()
        return [self._copy, *writes]

    def _without_frozen(self, state: dict[str, Any]) -> dict[str, Any]:
        """DeepSpeed leaves frozen weights out under one of their names only: a tied output head would stay."""
        if not self.frozen or "module" not in state:
            return state
        return state | {"module": {name: value for name, value in state["module"].items() if name in self.trained}}

    def _copy(self) -> None:
        try:
            self.memory.fill()
        finally:
            self.copied.set()

    def load_state(self, folder: Path, universal: bool = False) -> None:
        """Read what `save_state` wrote with the same number of ranks, or what `reshard` made of it: then it is `universal`. Collective."""
        with quiet(), reading(self.engine, universal):
            path, _ = self.engine.load_checkpoint(str(folder), tag="engine", load_module_strict=not self.frozen)
        if path is None:
            raise FileNotFoundError(f"{folder}: DeepSpeed found no checkpoint of rank {torch.distributed.get_rank()} in it")
        if self.optim is not None:
            self._set(self.optim)

    def _set(self, optim: OptimConfig) -> None:
        """The optimizer's settings are this run's: those that DeepSpeed has loaded are of the run that wrote the checkpoint."""
        optimizer: Any = self.engine.optimizer
        scheduler: Any = self.engine.lr_scheduler
        scheduler.base_lrs = [optim.lr for _ in scheduler.base_lrs]
        for group, factor in zip(optimizer.param_groups, scheduler.lr_lambdas, strict=True):
            group.update(_adamw(optim) | {"initial_lr": optim.lr, "lr": optim.lr * factor(scheduler.last_epoch)})


@contextlib.contextmanager
def _skipping_above(limit: float) -> Iterator[list[float]]:
    """Inside, DeepSpeed skips a step for a norm above `limit`, as it does for one that is not finite. Yields the norm, once known.

    By the function that each of its optimizers asks about the norm that it has computed: there is no setting for it.
    """
    from deepspeed.runtime import bf16_optimizer
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    users: list[Any] = [bf16_optimizer, stage3, stage_1_and_2]
    original, norms = bf16_optimizer.is_invalid_grad_norm, []

    def is_invalid(norm: Any) -> bool:
        if not norms:  # asked about other numbers later
            norms.append(float(norm))
            return original(norm) or norms[0] > limit
        return original(norm)

    for module in users:
        module.is_invalid_grad_norm = is_invalid
    try:
        yield norms
    finally:
        for module in users:
            module.is_invalid_grad_norm = original


def _stage(dtype: torch.dtype, optim: OptimConfig | None, trainer: TrainerConfig) -> int:
    """What DeepSpeed is asked to shard. Without ZeRO it sums no bfloat16 gradients in float32, and knows the norm of no gradient that ranks
    have parts of; what does not learn has only weights."""
    if optim is None:
        return 3 if trainer.zero_stage == 3 else 0
    return trainer.zero_stage if dtype == torch.float32 and not trainer.cut else max(trainer.zero_stage, 1)


def _optimizer(model: nn.Module, optim: OptimConfig, trainer: TrainerConfig) -> torch.optim.Optimizer:
    trained: Any = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if trainer.expert_parallel > 1:
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as by_group

        trained = by_group({"params": trained, "name": "all"})  # experts are reduced over other ranks than the rest
    if trainer.offload_optimizer:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(trained, **_adamw(optim))
    return torch.optim.AdamW(trained, fused=True, **_adamw(optim))


def _adamw(optim: OptimConfig) -> dict[str, Any]:
    return {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps, "weight_decay": optim.weight_decay}


def schedule(optim: OptimConfig, steps: int, held: int = 0) -> Callable[[int], float]:
    """Learning-rate factor by step: 0 for `held` of them, linear warm-up, then constant, linear to 0, or cosine to 0 at `steps`."""

    def factor(step: int) -> float:
        step -= held
        if step < 0:
            return 0.0
        if step < optim.warmup_steps:
            return (step + 1) / optim.warmup_steps
        progress = min(1.0, (step - optim.warmup_steps) / max(1, steps - held - optim.warmup_steps))
        if optim.schedule == "linear":
            return 1.0 - progress
        if optim.schedule == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * progress))
        return 1.0

    return factor


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """DeepSpeed logs dozens of lines per start at INFO, and prints how much memory it has; its warnings stay."""
    logger = logging.getLogger("DeepSpeed")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
