"""The types that travel between data, rollout engines, rewards and training.

Axes in names: E episodes, N tokens of all responses laid end to end (no padding), R rows and L columns of a packed micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question, tokenized once; nothing downstream re-renders its text."""

    index: int  # position in the data set; with the run's seed and the step it seeds the samples
    token_ids: list[int]
    row: dict[str, Any]  # the data set's columns, for the reward


@dataclass(slots=True)
class Episode:
    """One sampled answer to one prompt."""

    prompt: Prompt
    group: int  # position of its prompt in the step's batch; episodes of one group are compared with each other
    response_ids: list[int]
    logprobs: list[float]  # of the rollout engine, one per response token
    finished: bool  # ended by itself, not by the token limit
    text: str = ""  # decoded response without special tokens
    mask: list[int] = field(default_factory=list)  # 1 where the policy wrote the token; empty means all ones
    reward: float = 0.0


@dataclass(slots=True)
class Batch:
    """A packed micro-batch: several sequences per row, attention never crosses from one to the next.

    `index_N` and `target_N` pick what is learnt: the hidden state at flat position index_N[i] of (R*L) predicts target_N[i].
    All per-token tensors have length N and the same order: sequence after sequence.
    """

    input_ids_RL: torch.Tensor
    position_ids_RL: torch.Tensor  # restart at 0 with each sequence
    index_N: torch.Tensor
    target_N: torch.Tensor
    episode_N: torch.Tensor  # which of the caller's sequences a token belongs to
    flat_N: torch.Tensor  # where the token stands in the caller's flat order, so that outputs can be scattered back
    tokens_N: dict[str, torch.Tensor]  # per-token inputs of the loss: mask, advantages, old log-probabilities, ...
    packed: bool  # False: one sequence per row, so that plain causal attention is right
    real_tokens: int  # of the R*L input positions, those that are not padding

    def to(self, device: torch.device) -> Batch:
        """The same micro-batch on another device."""
        moved: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, value in moved.items():
            if isinstance(value, torch.Tensor):
                moved[name] = value.to(device, non_blocking=True)
        moved["tokens_N"] = {name: value.to(device, non_blocking=True) for name, value in self.tokens_N.items()}
        return Batch(**moved)
