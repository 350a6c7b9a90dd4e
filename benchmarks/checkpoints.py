"""How long a checkpoint holds the training up, against writing the same one before the next step; durable both ways.

A model of 50 million weights in float32 with AdamW on one rank: 604 MB of shards, on the disk of the system's temporary folder. What waits
is the call itself, and the next optimizer step where the copy in memory is not complete yet; before it come the gradients of a batch. That
copying and writing take CPU time from those is not counted: on GPUs it does not.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks.report import Ratio, Report
from trainer.checkpoints.background import Background
from trainer.checkpoints.folders import Checkpoints
from trainer.cluster.actors import free_port
from trainer.configs.sections import OptimConfig, TrainerConfig
from trainer.ranks.engine import Engine, init_distributed

LAYERS, WIDTH, BATCH = 12, 2048, 256
ROUNDS, WARM_UP = 6, 1
LIMIT = 600  # seconds that one may take


def run() -> Report:
    torch.set_num_threads(2)
    cpu = torch.device("cpu")
    init_distributed(0, 1, "127.0.0.1", free_port(), LIMIT, cpu)
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    engine = Engine(model, OptimConfig(), TrainerConfig(), 2, cpu)

    def gradients() -> float:
        began = time.perf_counter()
        engine.backward(engine(torch.ones(BATCH, WIDTH)).sum(), last=True)
        return time.perf_counter() - began

    gradients()
    engine.step()
    samples: dict[str, list[float]] = {"written before the next step": [], "blocked": [], "until durable": []}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as pool:
        checkpoints = Checkpoints(Path(folder), keep=1)
        background = Background(checkpoints, LIMIT)

        writing: list[Future[None]] = []

        def write(writes: list[Callable[[], None]]) -> None:
            while writes:
                writes.pop(0)()

        def begin(draft: Path) -> None:
            writing[:] = [pool.submit(write, engine.save_state(draft))]

        def written() -> bool:
            return writing[0].done() and writing[0].result() is None

        for step in range(1, 2 * ROUNDS, 2):
            began = time.perf_counter()
            with checkpoints.writing(step, {}) as draft:
                engine.save_state(draft, at_once=True)
            samples["written before the next step"].append(time.perf_counter() - began)
            began = time.perf_counter()
            background.write(step + 1, {}, begin, written)
            computing = gradients()
            engine.copied.wait(LIMIT)
            samples["blocked"].append(time.perf_counter() - began - computing)
            engine.step()
            background.wait()
            samples["until durable"].append(time.perf_counter() - began)
        size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    seconds = {name: statistics.median(values[WARM_UP:]) for name, values in samples.items()}
    return Report(
        "checkpoints",
        [Ratio("seconds, blocked / written before the next step", seconds["blocked"] / seconds["written before the next step"], 0.1)],
        facts={"size": f"{size / 1e6:.0f} MB", "seconds": "  ".join(f"{name} {value:.3f}" for name, value in seconds.items())},
        samples=samples,
    )
