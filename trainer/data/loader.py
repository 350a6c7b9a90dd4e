"""Prompts in batches forever, and in the same order after a restart."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np

from trainer.episodes import Prompt
from trainer.errors import ConfigError


class Loader:
    """Serves `batch` prompts at a time. The order of an epoch depends on seed and epoch alone, so the position is one number.

    A batch may end one epoch and begin the next: every prompt is served equally often, whatever the batch size.
    """

    def __init__(self, prompts: list[Prompt], batch: int, seed: int, shuffle: bool = True):
        if not prompts or batch < 1:
            raise ConfigError(f"a loader needs prompts and a batch of at least 1; it got {len(prompts)} prompts and a batch of {batch}")
        self.prompts = prompts
        self.batch = batch
        self.seed = seed
        self.shuffle = shuffle
        self.served = 0
        self._fingerprint = fingerprint(prompts)
        self._order = (-1, np.zeros(0, dtype=np.int64))  # epoch and its order

    @property
    def epoch(self) -> int:
        """Epochs served completely."""
        return self.served // len(self.prompts)

    def next(self) -> list[Prompt]:
        chosen = [self._at(self.served + i) for i in range(self.batch)]
        self.served += self.batch
        return chosen

    def _at(self, position: int) -> Prompt:
        epoch, offset = divmod(position, len(self.prompts))
        if not self.shuffle:
            return self.prompts[offset]
        if self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng([self.seed, epoch]).permutation(len(self.prompts)))
        return self.prompts[self._order[1][offset]]

    def state(self) -> dict[str, Any]:
        """JSON-able; `load` continues from it."""
        return {
            "served": self.served,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "rows": len(self.prompts),
            "fingerprint": self._fingerprint,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue after `state`. Raises ConfigError if it was taken on other data or in another order."""
        mine = self.state()
        if (state["rows"], state["fingerprint"]) != (mine["rows"], mine["fingerprint"]):
            raise ConfigError(
                f"data.path: the checkpoint was trained on other data ({state['rows']} prompts, {state['fingerprint']}; "
                f"here {mine['rows']}, {mine['fingerprint']}); restore data, tokenizer and eval_prompts, or choose another run.name"
            )
        for name, setting in (("seed", "run.seed"), ("shuffle", "data.shuffle")):
            if state[name] != mine[name]:
                raise ConfigError(f"{setting}: the checkpoint has {state[name]}, this run {mine[name]}; the order of the data would change")
        self.served = state["served"]


def fingerprint(prompts: list[Prompt]) -> str:
    """16 hex digits over token ids and columns of every prompt."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps([prompt.index, prompt.token_ids, prompt.row], sort_keys=True, default=str).encode())
    return digest.hexdigest()[:16]
