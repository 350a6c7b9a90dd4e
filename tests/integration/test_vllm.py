"""vLLM in this process: its answers are the model's own, before and after it was given other weights."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

pytest.importorskip("vllm", reason="vLLM is not installed (make install)")

from trainer import weights
from trainer.cluster.actors import free_port
from trainer.configs.ppo import PpoConfig
from trainer.episodes import Episode, Prompt, Turn
from trainer.rollout import Sampling, sample
from trainer.rollout.vllm import VllmEngine

PROMPTS = [Prompt(0, [3, 4, 5], {}), Prompt(1, [13, 6, 6, 7, 8, 9, 14], {}), Prompt(2, [10], {})]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def engine(wide_model: Path) -> VllmEngine:
    config = PpoConfig.model_validate(
        {
            "model": {"path": str(wide_model), "dtype": "float32"},
            "data": {"path": "a:b", "max_prompt_tokens": 16},
            "rollout": {"engine": "vllm", "max_new_tokens": 12, "max_sequences": 64, "temperature": 0.8},
            "placement": {"gpus_per_rank": 0, "processes": "one"},
        }
    )
    return VllmEngine(config, str(wide_model), 0)


@pytest.fixture(scope="module")
def lm(wide_model: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(wide_model, dtype=torch.float32)


@torch.no_grad()
def difference(lm: torch.nn.Module, episodes: list[Episode], temperature: float = 0.8) -> float:
    """Largest difference between the rollout engine's log-probabilities and the model's."""
    found = []
    for episode in episodes:
        prompt, response = episode.prompt.token_ids, episode.response_ids
        logits = lm(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / temperature
        expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(response)[:, None])[:, 0]
        found.append(float((torch.tensor(episode.logprobs) - expected).abs().max()))
    return max(found)


def drawn(engine: VllmEngine, seed: int) -> list[list[int]]:
    return [e.response_ids for e in sampled(engine, 8, seed)]


def sampled(engine: VllmEngine, samples: int, seed: int, groups: tuple[int, ...] = (0, 1, 2)) -> list[Episode]:
    """A step's batch."""
    return asyncio.run(sample(engine, PROMPTS, list(groups), Sampling(12, 0.8, samples=samples), seed))


def test_answers_are_grouped_by_prompt_end_as_they_say_and_have_the_models_log_probabilities(engine, lm):
    episodes = sampled(engine, 16, 3, (4, 5, 6))
    assert [e.group for e in episodes] == [4] * 16 + [5] * 16 + [6] * 16
    assert len({len(e.response_ids) for e in episodes}) > 3
    assert all(e.finished == (e.response_ids[-1] == 1) and (e.finished or len(e.response_ids) == 12) for e in episodes)
    assert difference(lm, episodes) < 1e-4


def test_answers_end_at_every_token_that_ends_a_turn(engine, monkeypatch):
    assert engine.ends == [1]
    monkeypatch.setattr(engine, "ends", [1, 7])  # as where a chat template ends turns with another token than the tokenizer's eos
    episodes = sampled(engine, 32, 5)
    assert {e.response_ids[-1] for e in episodes if e.finished} == {1, 7}
    assert not any({1, 7} & {*e.response_ids[:-1]} for e in episodes)


def test_a_text_ends_an_answer_that_is_otherwise_the_same(engine):
    texts = tuple(engine.decode([[7], [5, 6]]))

    def turns(stop: tuple[str, ...]) -> list[Turn]:
        requests = [engine.generate(PROMPTS[1].token_ids, Sampling(12, 0.8, samples=50, stop=stop, seed=40))]

        async def ask() -> list[list[Turn]]:
            return await asyncio.gather(*requests)

        [found] = asyncio.run(ask())
        return found

    ended = 0
    for whole, turn in zip(turns(()), turns(texts), strict=True):
        ids, n = turn.token_ids, len(turn.token_ids)
        assert ids == whole.token_ids[:n] and turn.logprobs == pytest.approx(whole.logprobs[:n], abs=1e-4)
        by_text = ids[-1] == 7 or ids[-2:] == [5, 6]
        ended += by_text
        assert by_text or n == len(whole.token_ids)
        assert turn.finish == ("stop" if by_text else whole.finish)
    assert 5 < ended < 50


def test_others_in_its_process_set_their_number_of_threads(engine):
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    assert torch.get_num_threads() == before + 1
    torch.set_num_threads(before)


def test_a_seed_gives_the_same_answers_and_another_seed_others(engine):
    first = drawn(engine, 5)
    assert drawn(engine, 5) == first
    assert drawn(engine, 6) != first


def test_an_engine_that_slept_answers_as_before_and_asking_twice_changes_nothing(engine):
    """On CPUs vLLM frees nothing, and pauses all the same."""
    before = drawn(engine, 5)
    for _ in range(2):
        engine.sleep()
    engine.wake("weights")
    engine.sleep()  # as for an engine that a dead one beside it has stopped on its way
    for memory in ("weights", "weights", "kv_cache", "kv_cache"):
        engine.wake(memory)
    assert drawn(engine, 5) == before


def test_requests_are_answered_one_by_one_and_one_with_a_seed_alike_whoever_runs_beside_it(engine, lm):
    """More tokens are asked for than one step of the engine has: prompts must not be read in parts."""
    mine = (PROMPTS[1].token_ids, Sampling(12, 0.8, samples=4, seed=40))
    others = [(PROMPTS[i % 3].token_ids, Sampling(1 + i % 12, 0.8, samples=4, seed=100 * i)) for i in range(100)]

    async def ask(*requests: tuple[list[int], Sampling]) -> list[list[Turn]]:
        return await asyncio.gather(*(engine.generate(*request) for request in requests))

    (alone,) = asyncio.run(ask(mine))
    *beside, among = asyncio.run(ask(*others, mine))
    assert [turn.token_ids for turn in among] == [turn.token_ids for turn in alone]
    assert len({tuple(turn.token_ids) for turn in alone}) > 1
    assert [len(turns) for turns in beside] == [4] * 100
    assert all(len(turn.token_ids) <= 1 + i % 12 for i, turns in enumerate(beside) for turn in turns)
    assert difference(lm, [Episode(PROMPTS[1], 0, [turn]) for turn in among]) < 1e-4
    greedy = asyncio.run(ask((PROMPTS[1].token_ids, Sampling(12, 0.0)), (PROMPTS[1].token_ids, Sampling(12, 0.0, seed=3))))
    assert greedy[0][0].token_ids == greedy[1][0].token_ids


def test_a_prompt_that_is_too_long_is_an_error_of_its_request_alone(engine):
    async def ask() -> list[object]:
        good = engine.generate(PROMPTS[0].token_ids, Sampling(2, seed=0))
        return await asyncio.gather(good, engine.generate([3] * 1000, Sampling(2)), return_exceptions=True)

    answer, error = asyncio.run(ask())
    assert isinstance(answer, list)
    assert isinstance(error, ValueError)


def test_weights_that_were_received_are_those_that_answer(engine, lm):
    with torch.no_grad():  # tied embeddings, norms, biases and all
        generator = torch.Generator().manual_seed(1)
        for parameter in lm.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    table = dict(lm.named_parameters())
    plan = weights.plan([weights.Parameter(n, tuple(p.shape), "float32") for n, p in table.items()], 1 << 14)
    assert len(plan) > 1
    rendezvous = weights.Rendezvous("127.0.0.1", free_port(), world=2, timeout=30, backend="gloo")

    def send() -> None:
        weights.send(weights.join(rendezvous, 0), plan, lambda names: [table[n].detach() for n in names])

    stale = difference(lm, sampled(engine, 4, 0))
    engine.ask(7, PROMPTS[1].token_ids, Sampling(8, samples=4))
    for _ in range(3):
        engine._step()
    sender = threading.Thread(target=send)
    sender.start()
    engine.connect(rendezvous, 1, plan)
    engine.receive(version=5)
    sender.join(30)
    turns = engine.work(60)[7]
    assert [turn.versions for turn in turns] == [([0] * 3 + [5] * 5)[: len(turn.token_ids)] for turn in turns]
    assert any(turn.switches == [(3, 5)] for turn in turns), "requests at work go on with the new weights"
    assert stale > 0.05, "the change must be one that shows"
    assert difference(lm, sampled(engine, 4, 0)) < 1e-4
    assert {turn.version for episode in sampled(engine, 1, 0) for turn in episode.turns} == {5}
