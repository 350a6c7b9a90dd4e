"""Weight sync in buckets against one call per parameter, between two Ray actors over gloo.

One call per parameter is what OpenRLHF and verl's first versions do: the driver asks both sides for each parameter, which they broadcast
and load. With `trainer.weights` both know the plan, so the driver asks once, and small parameters share a broadcast.
"""

from __future__ import annotations

import logging
import statistics
import time
from typing import Any

import ray
import torch

from benchmarks.report import Ratio, Report
from trainer import actors, models, weights
from trainer.configs.sections import ModelConfig

ROUNDS, WARM_UP = 12, 2
BUCKET_BYTES = 256 << 20  # the default of rollout.bucket_mb
MODEL = {
    "model_type": "qwen2",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


@ray.remote(num_cpus=0)
class Member:
    """Rank 0 sends its model's parameters, rank 1 copies them into its own."""

    def __init__(self, rank: int):
        torch.set_num_threads(1)
        config = ModelConfig(init=MODEL, tokenizer="characters:0123456789", dtype="float32")
        self.rank = rank
        self.table = dict(models.load_lm(config, seed=rank, device=torch.device("cpu")).named_parameters())

    def parameters(self) -> list[weights.Parameter]:
        return [weights.Parameter(name, tuple(p.shape), "float32") for name, p in self.table.items()]

    def address(self) -> tuple[str, int]:
        return actors.here()

    def join(self, rendezvous: weights.Rendezvous) -> None:
        self.group = weights.join(rendezvous, self.rank)

    @torch.no_grad()
    def sync(self, plan: weights.Plan) -> None:
        if self.rank == 0:
            weights.send(self.group, plan, lambda names: [self.table[name] for name in names])
            return
        for bucket in weights.receive(self.group, plan, torch.device("cpu")):
            for name, tensor in bucket:
                self.table[name].copy_(tensor)

    @torch.no_grad()
    def checksum(self) -> float:
        return sum(float(p.double().sum()) for p in self.table.values())


def run() -> Report:
    ray.init(num_cpus=2, logging_level=logging.WARNING)
    try:
        return measure()
    finally:
        ray.shutdown()


def measure() -> Report:
    members: list[Any] = [Member.remote(rank) for rank in range(2)]
    parameters = ray.get(members[0].parameters.remote())
    rendezvous = weights.Rendezvous(*ray.get(members[0].address.remote()), world=2, timeout=60, backend="gloo")
    ray.get([member.join.remote(rendezvous) for member in members])
    bucketed, single = weights.plan(parameters, BUCKET_BYTES), weights.plan(parameters, 1)

    def sync(plan: weights.Plan) -> None:
        ray.get([member.sync.remote(plan) for member in members])

    samples: dict[str, list[float]] = {"bucketed": [], "per parameter": [], "per parameter, one call": []}
    for _ in range(ROUNDS):  # one after the other, so that the machine's noise meets all
        samples["bucketed"].append(timed(lambda: sync(bucketed)))
        samples["per parameter"].append(timed(lambda: [sync((bucket,)) for bucket in single]))
        samples["per parameter, one call"].append(timed(lambda: sync(single)))
    sums = ray.get([member.checksum.remote() for member in members])
    if sums[0] != sums[1]:
        raise RuntimeError(f"after the sync the weights differ: {sums}")
    seconds = {name: statistics.median(values[WARM_UP:]) for name, values in samples.items()}
    return Report(
        "weights",
        [
            Ratio("broadcasts, per parameter / bucketed", len(single) / len(bucketed), 10, "at least"),
            Ratio("calls per process, per parameter / bucketed", len(single) / 1, 10, "at least"),
            Ratio("seconds, per parameter / bucketed", seconds["per parameter"] / seconds["bucketed"], 3, "at least"),
        ],
        facts={
            "model": f"{len(parameters)} tensors, {sum(p.numel for p in parameters) / 1e6:.1f}M parameters",
            **{name: f"{1000 * value:.1f} ms" for name, value in seconds.items()},
        },
        samples=samples,
    )


def timed(work: Any) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
