"""Rollout engines: what turns prompts into episodes.

Each is built as `RolloutEngine(config, model_path, seed)` and offers the methods of the protocol; `engines.py` runs them as Ray actors.
"""

from __future__ import annotations

from typing import Protocol

from trainer.types import Episode, Prompt
from trainer.weights import Plan, Rendezvous


class RolloutEngine(Protocol):
    def generate(self, prompts: list[Prompt], groups: list[int], samples: int, seed: int, greedy: bool = False) -> list[Episode]:
        """`samples` episodes per prompt, in the order of the prompts. The same seed and weights give the same tokens."""
        ...

    def receivers(self) -> int:
        """How many processes of this engine take part in a weight sync."""
        ...

    def connect(self, rendezvous: Rendezvous, rank: int, plan: Plan) -> None:
        """Join the weight sync as `rank` (the first of `receivers()` ranks)."""
        ...

    def receive(self) -> None:
        """Take the weights that the policy is sending, and forget what was cached under the old ones."""
        ...
