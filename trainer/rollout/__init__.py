"""Rollout engines: what samples answers to prompts, one request at a time or many at once.

Each is built as `RolloutEngine(config, model_path, seed)` in a process of its own; `engines.py` runs these processes as Ray actors.
`engines.py` and `calls.py` run in the driver, the rest in those processes. `sample` is how a step's batch of prompts becomes episodes; an
environment awaits `generate` turn by turn instead.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any, Protocol

from trainer.episodes import Episode, Prompt, Turn
from trainer.weights import Named, Plan, Rendezvous


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a request is sampled."""

    max_tokens: int  # per answer, the token that ends it included
    temperature: float = 1.0  # 0 takes the likeliest token each time
    top_p: float = 1.0
    samples: int = 1  # answers to the same prompt
    stop: tuple[str, ...] = ()  # texts that end an answer; it has the token with which they are complete as its last
    seed: int | None = None  # of this request alone: sample i draws from seed + i. None: of `RolloutEngine.seed`, shared by a batch
    pictures: tuple[Any, ...] = ()  # of the prompt (episodes.Prompt)
    experts: int | None = None  # from this token of the prompt on, turns come with the experts that tokens took; None: without


class RolloutEngine(Protocol):
    steps: int  # that it has taken, for all its requests together

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> list[Turn]:
        """`sampling.samples` turns that follow on `prompt_ids`: token ids, as many log-probabilities, how they ended, weight version.

        Log-probabilities (natural logarithm) are of the distribution that was sampled from, after temperature and top_p. A turn that
        ended by itself has the token that ended it as its last. Requests run together; with the same weights, the same order of
        requests and the same seeds the tokens are the same on CPUs.
        """
        ...

    def ask(self, name: int, prompt_ids: list[int], sampling: Sampling) -> None:
        """A request that nobody awaits: `work` returns its answer under this name."""
        ...

    def asked(self) -> int:
        """Requests that `work` has not answered."""
        ...

    def work(self, seconds: float) -> dict[int, list[Turn]]:
        """Work for so long on what was asked, and return the answers that are complete. Others stay, also while weights are received: their
        later tokens are of the newer version (`Turn.switches`).
        """
        ...

    def seed(self, value: int) -> None:
        """Begin the draws of requests without a seed of their own anew."""
        ...

    def decode(self, answers: list[list[int]]) -> list[str]:
        """Texts without special tokens."""
        ...

    def unrecorded(self) -> str:
        """Why turns never come with the experts that tokens took, however requests are sampled; "" where they do."""
        ...

    def receivers(self) -> int:
        """How many processes of this engine take part in a weight sync."""
        ...

    def connect(self, rendezvous: Rendezvous, rank: int, plan: Plan) -> None:
        """Join the weight sync as `rank` (the first of `receivers()` ranks)."""
        ...

    def receive(self, version: int) -> None:
        """Take the weights that the policy is sending, and forget what was cached under the old ones. `version` marks later turns."""
        ...

    def load(self, bucket: Named) -> None:
        """Take some of the weights from this process's memory; `loaded` follows the last of them."""
        ...

    def loaded(self, version: int) -> None:
        """All weights are those of `version`: mark later turns with it, and forget what was cached under the old ones."""
        ...

    def sleep(self) -> None:
        """Free what it has of a device that others share. It has no requests; where it sleeps already, nothing is done."""
        ...

    def wake(self, memory: str) -> None:
        """Take "weights", to be received anew, or "kv_cache" back; nothing is done where it is awake."""
        ...


async def sample(engine: RolloutEngine, prompts: list[Prompt], groups: list[int], sampling: Sampling, seed: int) -> list[Episode]:
    """`sampling.samples` episodes per prompt, in the order of the prompts. The same seed and weights give the same tokens."""
    engine.seed(seed)
    answers = await asyncio.gather(*(engine.generate(prompt.token_ids, of_prompt(sampling, prompt)) for prompt in prompts))
    episodes = [Episode(p, group, [turn]) for p, group, turns in zip(prompts, groups, answers, strict=True) for turn in turns]
    for episode, text in zip(episodes, engine.decode([e.response_ids for e in episodes]), strict=True):
        episode.text = text
    return episodes


def of_prompt(sampling: Sampling, prompt: Prompt) -> Sampling:
    """With the prompt's pictures, where it has some."""
    return replace(sampling, pictures=prompt.pictures) if prompt.pictures else sampling
