"""Distillation's two models: a teacher on every rank that only reads, and a policy that says how far it is from it.

What travels between them are hidden states: the distributions themselves, a float per token and entry of the vocabulary, are made chunk
by chunk where they are compared, and are never there as a whole.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from trainer import models
from trainer.configs.sections import Config, ModelConfig
from trainer.episodes import Batch
from trainer.models.heads import PolicyModel, after_head, hidden_states
from trainer.objectives.distillation import divergence
from trainer.ranks import parallel
from trainer.ranks.engine import Engine
from trainer.ranks.loading import sharded
from trainer.ranks.sequence_parallel import SequenceParallel


class Student(PolicyModel):
    """A policy that also returns its divergence (N,) from the teacher, where the batch says what the teacher makes of it.

    Both distributions are at the rollout's temperature, over the tokens that both models have: sizes of one family pad their vocabularies
    differently.
    """

    def __init__(self, lm: Any, temperature: float = 1.0, learn_entropy: bool = False, beta: float = 1.0):
        super().__init__(lm, temperature, learn_entropy)
        self.beta = beta

    def forward(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        if batch.teacher is None:
            return super().forward(batch)
        hidden_ND, (weight_VD, *bias_V), finish = batch.teacher

        def compare(own_ND: torch.Tensor, target_N: torch.Tensor, taught_ND: torch.Tensor) -> tuple[torch.Tensor, ...]:
            logprobs_NV = self.logprobs(own_ND)
            with torch.no_grad():
                logits_NV = finish(linear(taught_ND, weight_VD, *bias_V).float())
                taught_NV = (logits_NV / self.temperature).log_softmax(-1)
            distance_N = divergence(*_in_common(logprobs_NV, taught_NV), self.beta)
            return *self.of_targets(logprobs_NV, target_N), distance_N

        return self.head(compare, hidden_states(self.lm, batch), batch.target_N, hidden_ND)


def _in_common(own_NV: torch.Tensor, taught_NV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Over the tokens that both have; what one has besides is padding of its vocabulary."""
    size = min(own_NV.size(1), taught_NV.size(1))
    own_NV, taught_NV = (each if each.size(1) == size else each[:, :size].log_softmax(-1) for each in (own_NV, taught_NV))
    return own_NV, taught_NV


class Reader(nn.Module):
    """A language model that returns hidden states (N, D)."""

    def __init__(self, lm: Any):
        super().__init__()
        self.lm = lm

    def forward(self, batch: Batch) -> torch.Tensor:
        return hidden_states(self.lm, batch)


class Teacher:
    """On a rank of the policy, sharded over them under ZeRO-3. Collective, as its engine is."""

    def __init__(self, model: ModelConfig, config: Config, device: torch.device, shared: SequenceParallel | None = None):
        shard = config.trainer.zero_stage == 3
        with sharded(getattr(torch, model.dtype)) if shard else nullcontext():
            lm = models.load_lm(model, config.run.seed, device, home=parallel.home(config.trainer, shard, device))
        reader = Reader(lm.requires_grad_(False))
        if shared:
            shared.attach(reader, lm, joined=False)  # the policy compares its part with the teacher's
        trainer = parallel.fitting(lm, config.trainer)
        self.whole_LD = None
        if trainer.cut:
            with shared.not_parted(lm) if shared else nullcontext():
                self.whole_LD = parallel.whole(lm, device)
        self.engine = Engine(reader, None, trainer, 1, device)
        self.finish = after_head(lm)
        head = {id(parameter) for parameter in lm.get_output_embeddings().parameters()}
        self.head = [name for name, parameter in self.engine.model.named_parameters() if id(parameter) in head]

    @torch.no_grad()
    def read(self, batch: Batch) -> None:
        """Give the micro-batch what the teacher makes of it."""
        batch.teacher = self.engine(batch), self.engine.weights(self.head), self.finish
