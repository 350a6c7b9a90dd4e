"""Weight sync in buckets, between Ray actors over gloo: against one call per parameter, and against a plain copy of the same bytes.

One call per parameter is what OpenRLHF and verl's first versions do: the driver asks both sides for each parameter, which they broadcast
and load. With `trainer.weights` both know the plan, so the driver asks once, and small parameters share a broadcast. A plain copy is one
broadcast of one tensor as large as the model.
"""

from __future__ import annotations

import logging
import statistics
import time
from typing import Any

import ray
import torch

from benchmarks.report import Ratio, Report
from trainer import models, weights
from trainer.cluster import actors
from trainer.configs.sections import ModelConfig

ROUNDS, WARM_UP = 12, 2
ENGINES = (1, 2, 4)  # that take the weights together
BUCKET_BYTES = 256 << 20  # half of the default of rollout.bucket_mb
MODEL = {
    "model_type": "qwen2",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
LARGE = MODEL | {"hidden_size": 512, "intermediate_size": 2048}  # whose bytes take longer than the calls


@ray.remote(num_cpus=0)
class Member:
    """Rank 0 sends its model's parameters, the others copy them into their own."""

    def __init__(self, rank: int, model: dict[str, Any]):
        torch.set_num_threads(1)
        config = ModelConfig(init=model, tokenizer="characters:0123456789", dtype="float32")
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

    def copy(self) -> None:
        """One tensor of all bytes, into memory that is there."""
        if not hasattr(self, "flat"):
            self.flat = torch.zeros(sum(p.numel() for p in self.table.values()))
        weights.broadcast(self.group, self.flat).wait()

    @torch.no_grad()
    def checksum(self) -> float:
        return sum(float(p.double().sum()) for p in self.table.values())


def run() -> Report:
    ray.init(num_cpus=2, logging_level=logging.WARNING)
    try:
        calls, copies = measure(), against_copy()
    finally:
        ray.shutdown()
    return Report("weights", calls.ratios + copies.ratios, calls.facts | copies.facts, calls.samples | copies.samples)


def start(count: int, model: dict[str, Any]) -> tuple[list[Any], list[weights.Parameter]]:
    """So many members of one group, and the parameters of their model."""
    members: list[Any] = [Member.remote(rank, model) for rank in range(count)]
    rendezvous = weights.Rendezvous(*ray.get(members[0].address.remote()), world=count, timeout=60, backend="gloo")
    ray.get([member.join.remote(rendezvous) for member in members])
    return members, ray.get(members[0].parameters.remote())


def require_equal(members: list[Any]) -> None:
    sums = ray.get([member.checksum.remote() for member in members])
    if len(set(sums)) != 1:
        raise RuntimeError(f"after the sync the weights differ: {sums}")


def measure() -> Report:
    members, parameters = start(2, MODEL)
    bucketed, single = weights.plan(parameters, BUCKET_BYTES), weights.plan(parameters, 1)

    def sync(plan: weights.Plan) -> None:
        ray.get([member.sync.remote(plan) for member in members])

    samples: dict[str, list[float]] = {"bucketed": [], "per parameter": [], "per parameter, one call": []}
    for _ in range(ROUNDS):  # one after the other, so that the machine's noise meets all
        samples["bucketed"].append(timed(lambda: sync(bucketed)))
        samples["per parameter"].append(timed(lambda: [sync((bucket,)) for bucket in single]))
        samples["per parameter, one call"].append(timed(lambda: sync(single)))
    require_equal(members)
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


def against_copy() -> Report:
    """A sync of a larger model against a plain copy of its bytes, to several engines at once."""
    report = Report("weights", [])
    for count in ENGINES:
        members, parameters = start(1 + count, LARGE)
        plan = weights.plan(parameters, BUCKET_BYTES)
        samples: dict[str, list[float]] = {"sync": [], "copy": []}
        for _ in range(ROUNDS):
            samples["sync"].append(timed(lambda: ray.get([m.sync.remote(plan) for m in members])))  # noqa: B023
            samples["copy"].append(timed(lambda: ray.get([m.copy.remote() for m in members])))  # noqa: B023
        require_equal(members)
        for member in members:
            ray.kill(member)
        sync, copy = (statistics.median(samples[side][WARM_UP:]) for side in ("sync", "copy"))
        report.ratios.append(Ratio(f"seconds, sync / plain copy, {count} engines", sync / copy, 1.5))
        size = sum(p.bytes for p in parameters) / 1e6
        report.facts[f"{size:.0f} MB to {count} engines"] = f"{1000 * sync:.0f} ms, a plain copy {1000 * copy:.0f} ms"
        report.samples |= {f"{side}, {count} engines": values for side, values in samples.items()}
    return report


def timed(work: Any) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
