"""Requests that are awaited over an engine of steps, and what comes of turns: a step's batch, and conversations that train."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import torch

from trainer import models
from trainer.configs.algorithm import AlgorithmConfig
from trainer.configs.ppo import PpoConfig
from trainer.configs.sections import ModelConfig
from trainer.data.packing import Sequence, attach, flatten, pack, scatter
from trainer.episodes import Episode, Prompt, Turn
from trainer.models import heads
from trainer.objectives.advantages import group_relative
from trainer.objectives.aggregation import aggregate, denominators
from trainer.objectives.policy import policy_loss
from trainer.rollout import RolloutEngine, Sampling, sample
from trainer.rollout.hf import HfEngine
from trainer.rollout.stepped import SteppedEngine


class Counting(SteppedEngine):
    """Each step writes one token to every request: the number of requests in that step."""

    def __init__(self) -> None:
        super().__init__()
        self.running: dict[int, tuple[Sampling, list[int]]] = {}
        self.order: list[list[int]] = []  # prompts as they came
        self.failure: Exception | None = None

    def add(self, number: int, prompt_ids: list[int], sampling: Sampling) -> None:
        if not prompt_ids:
            raise ValueError("no prompt")
        self.order.append(prompt_ids)
        self.running[number] = (sampling, [])

    def step(self) -> dict[int, list[Turn]]:
        if self.failure:
            raise self.failure
        for _, tokens in self.running.values():
            tokens.append(len(self.running))
        done = [number for number, (sampling, tokens) in self.running.items() if len(tokens) == sampling.max_tokens]
        return {n: [Turn(self.running.pop(n)[1], [], "length", self.version)] for n in done}


async def tokens_of(request: Awaitable[list[Turn]]) -> list[int]:
    return (await request)[0].token_ids


def test_requests_made_together_are_in_the_same_steps_in_their_order():
    async def ask(engine: Counting) -> list[list[int]]:
        return await asyncio.gather(*(tokens_of(engine.generate([i], Sampling(length))) for i, length in enumerate((2, 1, 3))))

    engine = Counting()
    assert asyncio.run(ask(engine)) == [[3, 2], [3], [3, 2, 1]]
    assert engine.order == [[0], [1], [2]]
    assert asyncio.run(ask(engine)) == [[3, 2], [3], [3, 2, 1]], "another event loop finds it as new"


def test_a_request_joins_those_at_work():
    async def ask(engine: Counting) -> tuple[list[int], list[int]]:
        async def second() -> list[int]:
            await tokens_of(engine.generate([1], Sampling(1)))
            return await tokens_of(engine.generate([2], Sampling(1)))

        return await asyncio.gather(tokens_of(engine.generate([0], Sampling(4))), second())

    assert asyncio.run(ask(Counting())) == [[2, 2, 1, 1], [2]]


def test_a_request_that_is_refused_or_cancelled_leaves_the_others_alone():
    async def ask(engine: Counting) -> list[int]:
        kept, dropped = (asyncio.create_task(tokens_of(engine.generate([length], Sampling(length)))) for length in (3, 2))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="no prompt"):
            await engine.generate([], Sampling(1))
        dropped.cancel()
        return await kept

    assert asyncio.run(ask(Counting())) == [2, 2, 1]


def test_an_engine_that_fails_fails_all_that_wait_and_may_be_asked_again():
    engine = Counting()
    engine.failure = RuntimeError("out of memory")

    async def ask() -> list[object]:
        return await asyncio.gather(*(engine.generate([i], Sampling(1)) for i in range(2)), return_exceptions=True)

    assert [str(error) for error in asyncio.run(ask())] == ["out of memory"] * 2
    engine.failure = None
    engine.running.clear()
    assert all(isinstance(turns, list) for turns in asyncio.run(ask()))


# --- conversations ---------------------------------------------------------------------------------------------------------

PROMPTS = [Prompt(i, ids, {}) for i, ids in enumerate(([3, 4, 5], [13, 6, 6, 7], [10]))]
REPLY = [14, 3, 4]  # what the environment says between the two turns


@pytest.fixture(scope="module")
def engine(tiny_model) -> HfEngine:
    settings = {
        "model": {"path": str(tiny_model), "dtype": "float32"},
        "data": {"path": "a:b", "max_prompt_tokens": 16},
        "rollout": {"engine": "hf", "max_new_tokens": 6, "max_sequences": 64},
        "placement": {"gpus_per_rank": 0},
    }
    return HfEngine(PpoConfig.model_validate(settings), str(tiny_model), 0)


async def two_turns(engine: RolloutEngine, prompt: Prompt, group: int, seed: int) -> Episode:
    """The policy writes, the environment replies, the policy writes again. Rewarded for digits below five."""
    (first,) = await engine.generate(prompt.token_ids, Sampling(6, seed=seed))
    (second,) = await engine.generate([*prompt.token_ids, *first.token_ids, *REPLY], Sampling(6, seed=seed + 1))
    written = first.token_ids + second.token_ids
    reward = sum(3 <= token < 8 for token in written) / len(written)
    return Episode(prompt, group, [first, Turn(list(REPLY)), second], reward=reward)


def conversations(engine: RolloutEngine, samples: int = 8, converse: Callable = two_turns) -> list[Episode]:
    async def all_of_them() -> list[Episode]:
        return await asyncio.gather(
            *(converse(engine, prompt, g, 1000 * g + 10 * i) for g, prompt in enumerate(PROMPTS) for i in range(samples))
        )

    return asyncio.run(all_of_them())


def test_conversations_of_two_turns_train_on_exactly_the_tokens_that_the_policy_sampled(tiny_model, engine):
    episodes = conversations(engine)
    flat = flatten(episodes)
    sequences = [Sequence(e.prompt.token_ids, e.response_ids) for e in episodes]
    policy = heads.PolicyModel(models.load_lm(ModelConfig(path=str(tiny_model), dtype="float32"), 0, torch.device("cpu"), train=True))
    batches = pack(sequences, 64, pad_id=0)
    assert len(batches) > 1
    assert any(batch.packed for batch in batches), "conversations must share rows"

    def logprobs() -> torch.Tensor:
        return scatter([policy(batch)[0] for batch in batches], batches)

    sampled_N = flat.mask_N.bool()
    assert (~sampled_N).sum() == len(REPLY) * len(episodes)
    before_N = logprobs().detach()
    torch.testing.assert_close(before_N[sampled_N], flat.rollout_N[sampled_N], atol=1e-4, rtol=1e-4)

    rewards_E, groups_E = torch.tensor([e.reward for e in episodes]), torch.tensor([e.group for e in episodes])
    advantages_E = group_relative(rewards_E, groups_E, normalize=True)
    counts = denominators(flat.mask_N, flat.episode_N, len(episodes))

    def gradient(advantages_N: torch.Tensor) -> list[torch.Tensor]:
        policy.zero_grad()
        attach(batches, {"mask": flat.mask_N, "old": before_N, "advantages": advantages_N})
        for batch in batches:
            t = batch.tokens_N
            loss_N, _ = policy_loss(AlgorithmConfig(), batch, policy(batch)[0], t["old"])
            aggregate(loss_N, t["mask"], batch.episode_N, "token", counts).backward()
        return [p.grad.clone() for p in policy.parameters() if p.grad is not None]

    advantages_N = torch.repeat_interleave(advantages_E, flat.lengths_E)
    wanted = gradient(advantages_N)
    assert any(g.abs().sum() > 0 for g in wanted)
    other = gradient(torch.where(sampled_N, advantages_N, 100.0))
    assert all(torch.equal(a, b) for a, b in zip(wanted, other, strict=True)), "what the environment wrote must teach nothing"
    with torch.no_grad():
        for parameter, g in zip([p for p in policy.parameters() if p.grad is not None], wanted, strict=True):
            parameter.sub_(g, alpha=0.05)
    moved_N = (logprobs().detach() - before_N)[sampled_N]
    assert float((moved_N * advantages_N[sampled_N]).sum()) > 0, "rewarded turns must have become likelier"


def test_conversations_repeat_and_their_turns_follow_on_what_was_said(engine):
    first, again = conversations(engine), conversations(engine)
    assert [e.response_ids for e in first] == [e.response_ids for e in again]
    assert len({tuple(e.response_ids) for e in first}) > len(first) // 2
    for episode in first:
        assert [turn.sampled for turn in episode.turns] == [True, False, True]
        assert episode.mask.count(0) == len(REPLY)
        assert episode.finished == (episode.turns[2].finish == "stop")


def test_a_steps_batch_is_one_use_of_requests(engine):
    batch = asyncio.run(sample(engine, PROMPTS, [4, 5, 6], Sampling(6, samples=2), seed=9))
    assert [(e.prompt.index, e.group) for e in batch] == [(0, 4), (0, 4), (1, 5), (1, 5), (2, 6), (2, 6)]

    async def ask() -> list[list[Turn]]:
        engine.seed(9)
        return await asyncio.gather(*(engine.generate(p.token_ids, Sampling(6, samples=2)) for p in PROMPTS))

    assert [e.turns[0] for e in batch] == [turn for turns in asyncio.run(ask()) for turn in turns]
    assert all(e.text == engine.decode([e.response_ids])[0] for e in batch)
