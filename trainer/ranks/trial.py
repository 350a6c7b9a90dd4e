"""Whether a model is computed right by these ranks: asked of the model itself, as they have loaded it, before anything is learned."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from trainer.configs.sections import ModelConfig, TrainerConfig
from trainer.errors import ConfigError
from trainer.models.heads import PolicyModel
from trainer.models.vision import Sight
from trainer.ranks import own_logits, own_pictures, packed, parallel
from trainer.ranks.engine import Engine
from trainer.ranks.sequence_parallel import SequenceParallel

Tried = tuple[Engine, torch.Tensor | None]  # and the hidden states of its model before it was cut, if it was (`parallel.whole`)


def alone(
    source: ModelConfig,
    trainer: TrainerConfig,
    engines: list[Tried],
    shared: SequenceParallel | None,
    device: torch.device,
    sight: Sight | None = None,
    pictures: int = 16,
) -> bool:
    """Whether sequences that share a row see each other in any of the models, on any rank: then each gets a row of its own.

    The first engine has the model of `source`, which gets pictures by `sight`, up to so many of them in a prompt. Collective.
    Raises ConfigError for a model that this trainer, ranks that share sequences, or ranks with parts of it, would not compute right.
    """
    kind = engines[0][0].model.lm.config.model_type  # type: ignore[union-attr]
    name = f"model.path={source.path}" if source.path else "model.init"
    see, wrong, parted, cut, blind = False, 0.0, 0.0, 0.0, 0.0
    try:
        for engine, whole_LD in engines:
            lm = engine.model.lm
            with shared.not_parted(lm) if shared else nullcontext():
                if whole_LD is not None:
                    cut = max(cut, parallel.difference(whole_LD, parallel.hidden(engine, lm, device)))
                see |= packed.seen(engine, lm, device)
        [see] = _most(device, see)
        for engine, _ in engines:
            lm = engine.model.lm
            if isinstance(engine.model, PolicyModel):
                with shared.not_parted(lm) if shared else nullcontext():
                    wrong = max(wrong, own_logits.difference(engine, engine.model, device, alone=bool(see)))
            if sight and engine is engines[0][0] and isinstance(engine.model, PolicyModel):
                blind = own_pictures.difference(engine, engine.model, sight, device, alone=bool(see), several=pictures > 1)
            if shared:
                parted = max(parted, shared.difference(engine, lm, device))
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError) as error:  # of the model's own code
        raise ConfigError(f"{name}: {kind} in {source.dtype} cannot compute a micro-batch of this trainer: {error}") from error
    wrong, parted, cut, blind = _most(device, wrong, parted, cut, blind)
    if cut:
        text = f"{kind} computes hidden states that differ by {cut:.2g} from those of the whole model"
        raise ConfigError(f"{trainer.cut}: {text}; use 1")
    if wrong:
        text = f"its own log-probabilities of a text alone differ by {wrong:.2g} from those that the trainer computes beside another"
        raise ConfigError(f"{name}: {kind} is not supported: {text}")
    if blind:
        text = (
            f"its own log-probabilities of a text with a picture differ by {blind:.2g} from those that the trainer computes beside another"
        )
        raise ConfigError(f"{name}: {kind} is not supported with pictures: {text}; model.vision=off trains it on text only")
    if parted:
        setting = f"trainer.sequence_parallel={trainer.sequence_parallel}"
        raise ConfigError(f"{setting}: {kind} computes hidden states that differ by {parted:.2g} from those of one rank; use 1")
    return bool(see) and shared is None  # which have masks of their own


def _most(device: torch.device, *values: float) -> list[float]:
    """The largest of each on any rank."""
    agreed = torch.tensor([float(value) for value in values], dtype=torch.float32, device=device)
    torch.distributed.all_reduce(agreed, torch.distributed.ReduceOp.MAX)
    return agreed.tolist()
