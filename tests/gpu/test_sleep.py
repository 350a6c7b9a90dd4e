"""vLLM sleeps on a real GPU, and takes weights as it wakes."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from support.configs import ON_ONE_GPU, settings

from trainer import models, weights
from trainer.cluster.actors import free_port
from trainer.episodes import Prompt
from trainer.rollout import Sampling, sample

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")]


def test_an_engine_that_sleeps_frees_the_gpu_and_answers_with_the_weights_that_came(wide_model):
    vllm = pytest.importorskip("trainer.rollout.vllm", reason="vLLM is not installed")
    config = settings(wide_model, **ON_ONE_GPU)
    engine = vllm.VllmEngine(config, str(wide_model), 0)
    lm = models.load_lm(config.model, 0, torch.device("cpu"))
    table = dict(lm.named_parameters())
    plan = weights.plan([weights.Parameter(n, tuple(p.shape), "bfloat16") for n, p in table.items()], 1 << 20)
    rendezvous = weights.Rendezvous("127.0.0.1", free_port(), world=2, timeout=60, backend="gloo")

    def drawn() -> list[list[int]]:
        episodes = asyncio.run(sample(engine, [Prompt(0, [3, 4, 5], {})], [0], Sampling(5, 0.0, samples=1), 0))
        return [episode.response_ids for episode in episodes]

    def send() -> None:
        weights.send(weights.join(rendezvous, 0), plan, lambda names: [table[n].detach() for n in names])

    before, free = drawn(), torch.cuda.mem_get_info()[0]
    engine.sleep()
    total = torch.cuda.mem_get_info()[1]
    assert torch.cuda.mem_get_info()[0] - free > 0.2 * total, "the KV cache had about 0.3 of it"
    engine.wake("weights")
    sender = threading.Thread(target=send)
    sender.start()
    engine.connect(rendezvous, 1, plan)
    engine.receive(version=1)
    sender.join(60)
    engine.wake("kv_cache")
    assert drawn() == before
