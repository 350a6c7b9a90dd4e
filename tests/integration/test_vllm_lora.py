"""vLLM in this process with adapters that it is sent: its answers are those of the model with them."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed (make install)")

from trainer import models, weights
from trainer.cluster.actors import free_port
from trainer.configs.ppo import PpoConfig
from trainer.episodes import Episode, Prompt
from trainer.rollout import Sampling, sample
from trainer.rollout.vllm import VllmEngine

PROMPTS = [Prompt(0, [3, 4, 5], {}), Prompt(1, [13, 6, 6, 7, 8, 9, 14], {}), Prompt(2, [10], {})]


def sampled(engine: VllmEngine) -> list[Episode]:
    return asyncio.run(sample(engine, PROMPTS, [0, 1, 2], Sampling(12, 1.0, samples=4), 0))


@torch.no_grad()
def difference(lm: torch.nn.Module, episodes: list[Episode]) -> float:
    """Largest difference between the rollout engine's log-probabilities and the model's."""
    found = []
    for episode in episodes:
        prompt, response = episode.prompt.token_ids, episode.response_ids
        logits = lm(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(response)[:, None])[:, 0]
        found.append(float((torch.tensor(episode.logprobs) - expected).abs().max()))
    return max(found)


def test_adapters_that_were_received_are_those_that_answer_also_requests_at_work(wide_model: Path):
    """Of a rank that vLLM has no room of its own for, on some of the layers that it keeps as one."""
    config = PpoConfig.model_validate(
        {
            "model": {"path": str(wide_model), "dtype": "float32", "lora": {"rank": 3, "alpha": 5, "targets": ["q_proj", "down_proj"]}},
            "data": {"path": "a:b", "max_prompt_tokens": 16},
            "rollout": {"engine": "vllm", "max_new_tokens": 12, "max_sequences": 64},
            "placement": {"gpus_per_rank": 0, "processes": "one"},
        }
    )
    engine = VllmEngine(config, str(wide_model), 0)
    lm = models.load_lm(config.model, 0, torch.device("cpu"))
    table = {name: parameter for name, parameter in lm.named_parameters() if parameter.requires_grad}
    plan = weights.plan([weights.Parameter(name, tuple(p.shape), "float32") for name, p in table.items()], 1 << 10)
    assert len(plan) > 1
    rendezvous = weights.Rendezvous("127.0.0.1", free_port(), world=2, timeout=30, backend="gloo")

    def send() -> None:
        group = weights.join(rendezvous, 0)
        for _ in range(2):
            ready.wait(60)
            ready.clear()
            weights.send(group, plan, lambda names: [table[name].detach() for name in names])

    ready = threading.Event()
    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    engine.connect(rendezvous, 1, plan)
    ready.set()
    engine.receive(version=1)
    assert difference(lm, sampled(engine)) < 1e-4, "B is zero"
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in table.values():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    stale = difference(lm, sampled(engine))
    engine.ask(7, PROMPTS[1].token_ids, Sampling(8, samples=4))
    for _ in range(3):
        engine._step()
    ready.set()
    engine.receive(version=2)
    sender.join(30)
    turns = engine.work(60)[7]
    assert any(turn.switches == [(3, 2)] for turn in turns), "requests at work go on with the new adapters"
    assert stale > 0.05, "the change must be one that shows"
    assert difference(lm, sampled(engine)) < 1e-4
    # As an engine outside the sync group takes them.
    with torch.no_grad():
        for parameter in table.values():
            parameter.mul_(-0.5)
    assert difference(lm, sampled(engine)) > 0.05
    for bucket in plan:
        engine.load([(parameter.name, table[parameter.name].detach()) for parameter in bucket])
    engine.loaded(3)
    assert difference(lm, sampled(engine)) < 1e-4
