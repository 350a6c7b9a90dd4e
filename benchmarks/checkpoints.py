"""How long a checkpoint blocks training, against writing it: one rank, the shards of a model of 40 million parameters with its optimizer.

Blocked is what the step waits for, the copy in memory; written is copy, files, digests and fsync, as a run did before it went on.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

from benchmarks.report import Ratio, Report
from trainer.actors import free_port
from trainer.checkpoint import Checkpoints
from trainer.configs.sft import SftConfig
from trainer.data.packing import Sequence
from trainer.models import PolicyModel
from trainer.objectives.supervised import supervised
from trainer.train_sft import update
from trainer.workers import Role, Worker

ROUNDS, WARM_UP = 6, 1
MODEL = {
    "model_type": "qwen2",
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 10,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def run() -> Report:
    config = SftConfig.model_validate(
        {
            "model": {"init": MODEL, "tokenizer": "characters:0123456789", "dtype": "float32"},
            "data": {"path": "a:b", "max_prompt_tokens": 8},
            "trainer": {"prompts_per_step": 1, "micro_batch_tokens": 64},
            "placement": {"gpus_per_rank": 0},
        }
    )
    role = Role("policy", PolicyModel, 0, config.optim, partial(supervised, config.algorithm), config.updates())
    worker = Worker(config, role, 0, 1, None, 2)
    worker.start("127.0.0.1", free_port())
    update(worker, [Sequence([3, 4], [5, 6])], 0, 1)  # the optimizer has no state before
    seconds: dict[str, list[float]] = {"blocked": [], "written": []}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        checkpoints = Checkpoints(Path(folder), keep=1)
        for step in range(1, ROUNDS + 1):
            began = time.perf_counter()
            with checkpoints.writing(step, {}) as draft:
                worker.snapshot()
                seconds["blocked"].append(time.perf_counter() - began)
                worker.write(draft)
                worker.writing.result()
            seconds["written"].append(time.perf_counter() - began)
        size = sum(file.stat().st_size for file in Path(folder).rglob("*"))
    torch.distributed.destroy_process_group()
    medians = {name: statistics.median(values[WARM_UP:]) for name, values in seconds.items()}
    return Report(
        "checkpoints",
        [Ratio("seconds that training is blocked / seconds of writing it", medians["blocked"] / medians["written"], 0.1)],
        facts={"size": f"{size / 1e6:,.0f} MB", "seconds": "  ".join(f"{name} {value:.3f}" for name, value in medians.items())},
        samples=dict(seconds),
    )
