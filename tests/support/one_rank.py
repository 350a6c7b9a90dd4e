"""A learner of one rank in this process, for tests of what it trains; they want the fixture `one_rank`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainer.cluster.actors import free_port
from trainer.configs.sft import SftConfig
from trainer.data.packing import Sequence
from trainer.models.heads import PolicyModel
from trainer.objectives.supervised import supervised
from trainer.ranks.worker import Role, Worker

DRAW = torch.Generator().manual_seed(0)
BATCHES = [[Sequence([3, 4, 5], torch.randint(3, 15, (6,), generator=DRAW).tolist()) for _ in range(4)] for _ in range(6)]


def learner(config: SftConfig) -> Role:
    return Role("policy", PolicyModel, 0, config.optim, partial(supervised, config.algorithm), config.updates())


def started(
    path: Path,
    model: dict[str, Any],
    role: Callable[[SftConfig], Role] = learner,
    dtype: str = "float32",
    stage: int = 0,
    trainer: dict[str, Any] | None = None,
) -> Worker:
    """`model`, `trainer`: further settings of these sections."""
    config = SftConfig.model_validate(
        {
            "model": {"path": str(path), "dtype": dtype, **model},
            "data": {"path": "a:b", "max_prompt_tokens": 8},
            "optim": {"lr": 1e-2},
            "trainer": {"prompts_per_step": 4, "micro_batch_tokens": 20, "steps": 6, "zero_stage": stage, **(trainer or {})},
            "placement": {"gpus_per_rank": 0},
        }
    )
    worker = Worker(config, role(config), 0, 1, None, 1)
    worker.start("127.0.0.1", free_port())
    return worker
