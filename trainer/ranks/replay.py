"""Router replay in a rank: the experts that a micro-batch brings along are those that its tokens take (`models.routers`)."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from trainer.data.packing import Sequence, pack
from trainer.episodes import Batch
from trainer.models.routers import Routers
from trainer.models.routers import tried as tried_on
from trainer.ranks.engine import Engine
from trainer.ranks.sequence_parallel import SequenceParallel

TOKENS = 13  # of the text that a model is tried with


def tried(engine: Engine, lm: Any, setting: str, device: torch.device, shared: SequenceParallel | None) -> tuple[Routers | None, str]:
    """See `routers.tried`. From now on micro-batches of `engine` are replayed. To be called after ranks that share sequences have begun to
    part them: each rank gets the experts of its part. Collective under ZeRO-3.
    """
    ids = [(1 + 5 * i) % lm.config.get_text_config().vocab_size for i in range(TOKENS)]
    [batch] = pack([Sequence(ids, ids[:1])], TOKENS, pad_id=0, one_row=True)
    batch = batch.to(device)
    with shared.not_parted(lm) if shared else nullcontext():
        routers, why = tried_on(lm, lambda: engine(batch), TOKENS, setting)
    if routers:
        engine.model.register_forward_pre_hook(lambda _, inputs: _begin(routers, inputs[0]))
    return routers, why


def _begin(routers: Routers, batch: Batch) -> None:
    """Raises ValueError for a record of another model."""
    given = batch.experts_RLMK
    if given is not None and given.shape[2:] != (len(routers.layers), routers.k):
        has, wants = tuple(given.shape[2:]), (len(routers.layers), routers.k)
        raise ValueError(f"a record of experts has layers and experts of a token {has}, the model {wants}")
    routers.replay(None if given is None else given.flatten(0, 1))


def counts(routers: Routers | None) -> dict[str, torch.Tensor]:
    """Of the last micro-batch, to be added up: (token, layer) that were given experts, and those whose router would have chosen others."""
    if routers is None or routers.given_NMK is None:
        return {}
    given, differ = routers.counted()
    return {"routed": given, "rerouted": differ}
