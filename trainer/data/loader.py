"""Prompts in batches forever, and in the same order after a restart."""

from __future__ import annotations

from typing import Any

import numpy as np

from trainer.configs.data import DataConfig
from trainer.data.fingerprints import fingerprint
from trainer.data.rows import of_set
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

    def next(self, count: int | None = None) -> list[Prompt]:
        """A batch, or `count` prompts."""
        count = self.batch if count is None else count
        chosen = [self._at(self.served + i) for i in range(count)]
        self.served += count
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


class Mixture:
    """Serves `batch` prompts at a time from several sources in proportion to their weights, each in an order of its own, as `Loader`.

    The next prompt is of the source that is furthest behind its share, so that after every batch each has served its share to within
    about one prompt, and the numbers served so far are all there is to restore. A source smaller than its share begins a new epoch.
    """

    def __init__(self, sources: dict[str, list[Prompt]], weights: dict[str, float], batch: int, seed: int, shuffle: bool = True):
        self.prompts = [prompt for prompts in sources.values() for prompt in prompts]
        self.loaders = {name: Loader(prompts, 1, seed, shuffle) for name, prompts in sources.items()}
        self.shares = {name: weights[name] / sum(weights.values()) for name in sources}
        self.batch = batch

    def next(self, count: int | None = None) -> list[Prompt]:
        return [self._one() for _ in range(self.batch if count is None else count)]

    def _one(self) -> Prompt:
        served = 1 + sum(loader.served for loader in self.loaders.values())
        behind = max(self.loaders, key=lambda name: self.shares[name] * served - self.loaders[name].served)
        return self.loaders[behind].next()[0]

    def state(self) -> dict[str, Any]:
        """JSON-able; `load` continues from it."""
        return {"sources": {name: loader.state() for name, loader in self.loaders.items()}}

    def load(self, state: dict[str, Any]) -> None:
        """Continue after `state`. Raises ConfigError if it was taken on other data or in another order."""
        if state.get("sources", {}).keys() != self.loaders.keys():
            there = ", ".join(state.get("sources", {})) or "none"
            raise ConfigError(f"data.mix: the checkpoint was trained on other sources ({there}); restore them, or choose another run.name")
        for name, loader in self.loaders.items():
            with of_set(f"data.mix.{name}"):
                loader.load(state["sources"][name])


def make_loader(data: DataConfig, prompts: list[Prompt], batch: int, seed: int) -> Loader | Mixture:
    """Of prompts as `load_prompts` returns them, or a part of those of each source."""
    if not data.mix:
        return Loader(prompts, batch, seed, data.shuffle)
    return Mixture(by_source(prompts), {name: source.weight for name, source in data.mix.items()}, batch, seed, data.shuffle)


def hold_out(data: DataConfig, prompts: list[Prompt], count: int) -> tuple[list[Prompt], list[Prompt]]:
    """The last `count` prompts are evaluated on and never trained on; of a mixture the last ones of each source, by its weight.

    Raises ConfigError when nothing would be left to train on.
    """
    if not data.mix:
        if count >= len(prompts):
            raise ConfigError(f"trainer.eval_prompts={count}: data.path has {len(prompts)} prompts; leave some to train on")
        return prompts[: len(prompts) - count], prompts[len(prompts) - count :]
    train, held_out, total, before = [], [], sum(source.weight for source in data.mix.values()), 0.0
    for name, of_source in by_source(prompts).items():
        until = before + data.mix[name].weight
        share = round(count * until / total) - round(count * before / total)  # these add up to count
        before = until
        if share >= len(of_source):
            raise ConfigError(
                f"trainer.eval_prompts={count}: data.mix.{name}.weight makes {share} of them its own, and it has {len(of_source)} prompts; "
                "leave some to train on"
            )
        train += of_source[: len(of_source) - share]
        held_out += of_source[len(of_source) - share :]
    return train, held_out


def by_source(prompts: list[Prompt]) -> dict[str, list[Prompt]]:
    """Of a mixture, in the order of data.mix."""
    found: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        found.setdefault(prompt.row["mix"], []).append(prompt)
    return found
