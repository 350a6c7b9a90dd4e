"""Weights that another process on the same GPU reads where they lie."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch

from trainer import weights
from trainer.cluster.actors import free_port

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")]
GPU = torch.device("cuda", 0)


def take(rendezvous: weights.Rendezvous, plan: weights.Plan, syncs: int, answers: Any) -> None:
    group = weights.join(rendezvous, 1)
    for _ in range(syncs):
        took = {name: tensor.to("cpu", copy=True) for bucket in weights.receive(group, plan, GPU) for name, tensor in bucket}
        answers.put({name: tensor.float().numpy() for name, tensor in took.items()})


@pytest.mark.parametrize("bucket", [1 << 10, 1 << 30])
def test_a_process_reads_what_lies_there_now_and_memory_is_free_afterwards(bucket):
    """Views of one flat tensor, as ZeRO has them, and one of its own; some were elsewhere in between, as with turns on a GPU."""
    flat = torch.arange(10_000, device=GPU).to(torch.bfloat16)
    table = {"a": flat[:4000].view(40, 100), "b": flat[4000:], "c": torch.randn(7, 5, device=GPU, dtype=torch.bfloat16)}
    plan = weights.plan([weights.Parameter(name, tuple(t.shape), "bfloat16") for name, t in table.items()], bucket)
    rendezvous = weights.Rendezvous("127.0.0.1", free_port(), world=2, timeout=60, backend="ipc")
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    other = context.Process(target=take, args=(rendezvous, plan, 3, answers))
    other.start()
    try:
        group = weights.join(rendezvous, 0)
        for _ in range(3):
            weights.send(group, plan, lambda names, table=table: [table[name] for name in names])
            took = answers.get(timeout=60)
            for name, tensor in table.items():
                torch.testing.assert_close(torch.from_numpy(took[name]), tensor.float().cpu(), rtol=0, atol=0)
            table = {name: (tensor.cpu() + 1).to(GPU) for name, tensor in table.items()}
        other.join(60)
        assert other.exitcode == 0
    finally:
        other.kill()


def test_a_process_that_died_ends_the_sending_with_an_error():
    plan = weights.plan([weights.Parameter("a", (4,), "float32")], 1 << 20)
    rendezvous = weights.Rendezvous("127.0.0.1", free_port(), world=2, timeout=60, backend="ipc")
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()  # which the other process must find when it starts
    other = context.Process(target=take, args=(rendezvous, plan, 1, answers))
    other.start()
    group = weights.join(rendezvous, 0)
    other.kill()
    other.join(60)
    with pytest.raises(weights.RunError, match=r"^weight sync: policy-0 on .* a rollout engine is gone"):
        weights.send(group, plan, lambda names: [torch.ones(4, device=GPU) for _ in names])
