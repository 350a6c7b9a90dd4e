"""A step with experts over two ranks (trainer.expert_parallel) against ZeRO-3 without it, and what rank 0 takes to sync and export a model.

Two processes on CPUs train a mixture of 16 experts, of which a token takes two. ZeRO-3 gathers all of them in every micro-batch; those that
are spread stay, and tokens travel. The two ways take turns. The exported models are dense and cut over both ranks, with buckets and files
small enough that each model has many of them.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import Ratio, Report
from trainer import models, weights
from trainer.cli import parse
from trainer.cluster.actors import free_port
from trainer.configs.ppo import PpoConfig
from trainer.configs.sections import ModelConfig
from trainer.data.packing import Sequence
from trainer.models import streaming
from trainer.objectives.aggregation import denominators, part
from trainer.online.roles import roles_of
from trainer.ranks import worker

RANKS, ROUNDS, STEPS, WARM_UP = 2, 3, 3, 1
SECONDS = 300  # within which the ranks end
MEMORY = ("export", "sync")
SETTLE = 0.5  # seconds before what is watched begins
LETTERS = "characters:abcdefghijklmnopqrstuvwxyz"
SMALL = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
EXPERTS = {"num_local_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
MIXTURE = {**SMALL, "num_hidden_layers": 2, "model_type": "qwen3_moe", "hidden_size": 256, **EXPERTS}
DENSE = {**SMALL, "model_type": "qwen2", "hidden_size": 768, "intermediate_size": 3072}
LAYERS = {"small": 3, "large": 12}
WAYS = {"ZeRO-3": 1, "experts over ranks, ZeRO-3": 2}  # trainer.expert_parallel
TOKENS, SEQUENCES = 64, 4  # of a sequence, and of a rank's step
PIECE = 16 << 20  # bytes of a bucket and of a file, in place of 256 and 512 MiB


def run() -> Report:
    with tempfile.TemporaryDirectory(prefix="flotilla-parallel-") as folder:
        mixture = made(MIXTURE, Path(folder) / "mixture")
        seconds: dict[str, list[float]] = {name: [] for name in WAYS}
        for _ in range(ROUNDS):
            for name, ranks in WAYS.items():
                seconds[name] += together(steps, mixture, {"zero_stage": 3, "expert_parallel": ranks})
        sizes = {name: made(DENSE | {"num_hidden_layers": layers}, Path(folder) / name) for name, layers in LAYERS.items()}
        memory = {name: watched(path, {"zero_stage": 1, "tensor_parallel": 2}) for name, path in sizes.items()}
    zero, spread = (statistics.median(each) for each in seconds.values())
    small, large = memory.values()
    return Report(
        "parallel",
        [
            Ratio("step of a mixture, experts over two ranks / ZeRO-3", spread / zero, 1.0),
            *(Ratio(f"bytes that rank 0 takes in a {name}, large model / a bucket", large[name] / PIECE, 2.0) for name in MEMORY),
            *(Ratio(f"bytes that rank 0 takes in a {name}, large / small model", large[name] / small[name], 1.25) for name in MEMORY),
        ],
        {f"seconds, {name}": f"{statistics.median(each):.3f}" for name, each in seconds.items()}
        | {
            name: f"{each['size'] / 1e6:.0f} MB, {each['export'] / 1e6:.0f} MB more in an export, {each['sync'] / 1e6:.0f} in a sync"
            for name, each in memory.items()
        },
        {"seconds": seconds, "memory": memory},
    )


def made(sizes: dict[str, Any], folder: Path) -> str:
    """A model with random weights."""
    config = ModelConfig(init=sizes, tokenizer=LETTERS, dtype="float32")
    lm = models.load_lm(config, 0, torch.device("cpu"))
    models.export(lm, lm.state_dict(), models.load_tokenizer(config), folder)
    return str(folder)


def together(function: Callable[..., list[float]], path: str, way: dict[str, int]) -> list[float]:
    """What rank 0 of RANKS processes returns."""
    port = free_port()
    with ProcessPoolExecutor(RANKS, mp_context=get_context("spawn")) as pool:
        first, *_ = [pool.submit(function, rank, port, path, way) for rank in range(RANKS)]
        return first.result(SECONDS)


def started(rank: int, port: int, path: str, way: dict[str, int]) -> worker.Worker:
    trainer = {"timeout": SECONDS, "micro_batch_tokens": 2 * TOKENS, **way}
    settings = {**{f"trainer.{key}": value for key, value in trainer.items()}, "model.path": path, "model.dtype": "float32"}
    settings |= {"data.path": "trainer.data.tasks:sort_digits", "reward.function": "digits_share", "rollout.engine": "hf"}
    settings |= {"data.max_prompt_tokens": 2, "rollout.max_new_tokens": TOKENS - 2}
    settings |= {"placement.ranks": RANKS, "placement.gpus_per_rank": 0, "placement.threads": 1}
    config = parse([f"{key}={value}" for key, value in settings.items()], prog="benchmarks.parallel", model=PpoConfig)
    made = worker.Worker(config, roles_of(config)[0], rank, RANKS, path, 1)
    made.start("127.0.0.1", port)
    return made


def steps(rank: int, port: int, path: str, way: dict[str, int]) -> list[float]:
    """Seconds of each optimizer step after the first."""
    learner = started(rank, port, path, way)
    sequences = [Sequence([3 + i, 4], [3 + (5 * rank + 7 * i + j) % 26 for j in range(TOKENS - 2)]) for i in range(SEQUENCES)]
    episode_N = torch.arange(RANKS * SEQUENCES).repeat_interleave(TOKENS - 2)
    counts = part(denominators(torch.ones(len(episode_N)), episode_N, RANKS * SEQUENCES), [*range(SEQUENCES)])
    own = SEQUENCES * (TOKENS - 2)
    tokens_N = {"mask": torch.ones(own), "rollout": torch.zeros(own), "advantages": torch.linspace(-1, 1, own)}
    taken = []
    for _ in range(WARM_UP + STEPS):
        began = time.perf_counter()
        learner.optimizer_step(sequences, tokens_N, counts, 1)
        taken.append(time.perf_counter() - began)
    return taken[WARM_UP:]


def phases(rank: int, port: int, path: str, way: dict[str, int], meeting: int) -> list[float]:
    """An export, then a sync; while each lasts there is a file with rank 0's number. Returns the bytes of the files of weights."""
    worker.EXPORT_BYTES = streaming.SHARD_BYTES = PIECE
    learner, folder = started(rank, port, path, way), Path(f"{path}-exported")
    rendezvous = weights.Rendezvous("127.0.0.1", meeting, 2, SECONDS, "gloo") if rank == 0 else None
    learner.connect(rendezvous, weights.plan(learner.parameters(), PIECE / 2))
    for name, act in (("export", partial(learner.export, folder)), ("sync", learner.send)):
        mark = Path(f"{path}-{name}")
        if rank == 0:
            mark.with_suffix(".tmp").write_text(str(os.getpid()))
            mark.with_suffix(".tmp").rename(mark)
            time.sleep(SETTLE)
        act()
        if rank == 0:
            mark.unlink()
    return [float(sum(file.stat().st_size for file in folder.glob("*.safetensors")))]


def receive(path: str, meeting: int) -> None:
    """What a rollout engine does with a sync, without one."""
    bare = models.without_weights(ModelConfig(path=path, dtype="float32"))
    parameters = [weights.Parameter(name, tuple(each.shape), "float32") for name, each in models.saved_tensors(bare).items()]
    group = weights.join(weights.Rendezvous("127.0.0.1", meeting, 2, SECONDS, "gloo", joining=SECONDS), 1)
    for _ in weights.receive(group, weights.plan(parameters, PIECE / 2), torch.device("cpu")):
        pass


def watched(path: str, way: dict[str, int]) -> dict[str, float]:
    """Bytes of the model's files, and the most that rank 0 has beyond what it had, in a sync and in an export: seen from this process."""
    port, meeting = free_port(), free_port()
    most: dict[str, int] = dict.fromkeys(MEMORY, 0)
    with ProcessPoolExecutor(RANKS + 1, mp_context=get_context("spawn")) as pool:
        first, *others = [pool.submit(phases, rank, port, path, way, meeting) for rank in range(RANKS)]
        engine = pool.submit(receive, path, meeting)
        for name in [*most]:
            mark = Path(f"{path}-{name}")
            while not mark.exists() and not first.done():
                time.sleep(0.005)
            before = None
            with suppress(FileNotFoundError):
                process = int(mark.read_text())
                while mark.exists():
                    now = own(process)
                    before = before or now
                    most[name] = max(most[name], now - before)
        [size] = first.result(SECONDS)
        for each in (*others, engine):
            each.result(SECONDS)
    return {"size": size, **most}


def own(process: int) -> int:
    """Bytes of a process in memory that lie in no file."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))
