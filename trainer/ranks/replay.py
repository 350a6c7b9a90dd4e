"""Router replay in a rank: the experts that a micro-batch brings along are those that its tokens take (`models.routers`)."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from trainer.data.packing import Sequence, pack
from trainer.episodes import Batch
from trainer.models import routers
from trainer.ranks.engine import Engine
from trainer.ranks.sequence_parallel import SequenceParallel

TOKENS = 13  # of the text that a model is tried with


class Replay:
    """Of the model of `engine`, whose micro-batches are replayed from now on, where it can and is to. Collective under ZeRO-3.

    To be made after `shared` has begun to part them: each rank gets the experts of its part.
    """

    def __init__(self, engine: Engine, lm: Any, setting: str, device: torch.device, shared: SequenceParallel | None):
        """`setting`: rollout.router_replay. Raises ConfigError where it must and cannot; otherwise `why` says why not."""
        self.shared = shared
        ids = [(1 + 5 * i) % lm.config.get_text_config().vocab_size for i in range(TOKENS)]
        [batch] = pack([Sequence(ids, ids[:1])], TOKENS, pad_id=0, one_row=True)
        batch = batch.to(device)
        with shared.not_parted(lm) if shared else nullcontext():
            found, self.why = routers.tried(lm, lambda: engine(batch), TOKENS, setting)
        if found:
            engine.model.register_forward_pre_hook(lambda _, inputs: self._begin(found, inputs[0]))
        self.routers = found

    @staticmethod
    def _begin(found: routers.Routers, batch: Batch) -> None:
        """Raises ValueError for a record of another model."""
        given = batch.experts_RLMK
        if given is not None and given.shape[2:] != (len(found.layers), found.k):
            has, wants = tuple(given.shape[2:]), (len(found.layers), found.k)
            raise ValueError(f"a record of experts has layers and experts of a token {has}, the model {wants}")
        found.replay(None if given is None else given.flatten(0, 1))

    def counts(self) -> dict[str, torch.Tensor]:
        """Of the last micro-batch, to be added up: (token, layer) with experts from a record, and those whose router would have chosen
        others. Collective among ranks that share sequences."""
        if self.routers is None or self.routers.given_NMK is None:
            return {}
        both = torch.stack(self.routers.counted()).float()
        if self.shared:
            torch.distributed.all_reduce(both, group=self.shared.group)
        return {"routed": both[0], "rerouted": both[1]}
