"""Episodes that are played in this process with a rollout engine, round by round."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from support.seeing import seen

from trainer.environments.policy import Limits, Policy
from trainer.environments.pool import _episodes
from trainer.environments.runner import Ended, Job, Runner
from trainer.episodes import Episode, Prompt
from trainer.rewards.terms import Reward
from trainer.rollout import Sampling


def played(engine: Any, rollout: Callable[..., Awaitable[Any]], prompts: list[Prompt], **more: Any) -> list[tuple[Prompt, Ended]]:
    """An episode for each prompt, in rounds."""
    reward = Reward("rollout", rollout, batched=False, awaited=True, weights={})
    runner = Runner(reward, engine.tokenizer, Limits(9, 4, 400, 60), **more)
    runner.begin([Job((i, 0), prompt, 0) for i, prompt in enumerate(prompts)])
    found: list[Ended] = []
    while True:
        asked, ended = runner.advance(whole=True)
        found += ended
        if not asked:
            return [(prompts[each.key[0]], each) for each in sorted(found, key=lambda each: each.key)]

        async def answers(asked: Any = asked) -> list[Any]:
            return await asyncio.gather(*(engine.generate(each.request.token_ids, each.sampled(Sampling(4))) for each in asked))

        turns = asyncio.run(answers())
        runner.answer({each.name: turn for each, [turn] in zip(asked, turns, strict=True)})


def episodes_of(found: list[tuple[Prompt, Ended]]) -> list[Episode]:
    for _, ended in found:
        assert ended.mistake is None, ended.mistake
    return [episode for prompt, ended in found for episode in _episodes(prompt, ended)]


async def shown(policy: Policy, row: dict[str, Any]) -> float:
    """A picture after each turn, of other sizes than the one before; two at once after the second."""
    await policy.generate()
    await policy.generate(observation=["\n", seen(10 + row["number"], (64, 32)).image(), "count="])
    parts = [{"type": "image", "image": seen(20).image()}, {"type": "text", "text": " "}, {"type": "image", "image": seen(21).encoded()}]
    await policy.generate(observation=parts)
    return 1.0
