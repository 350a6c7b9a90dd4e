"""The types that travel between data, rollout engines, rewards and training.

Axes in names: E episodes, N tokens of all responses laid end to end (no padding), R rows and L columns of a packed micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # rewards are computed, and data read, by processes that have not loaded torch
    from collections.abc import Callable

    import numpy as np
    import torch


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question, tokenized once; nothing downstream re-renders its text."""

    index: int  # position in the data set; with the run's seed and the step it seeds the samples
    token_ids: list[int]
    row: dict[str, Any]  # the data set's columns, for the reward
    pictures: tuple[Any, ...] = ()  # chat.pictures.Picture, in the order of their tokens


@dataclass(slots=True)
class Turn:
    """Tokens that one author added to a conversation: the policy, by sampling, or the environment that answers it."""

    token_ids: list[int]
    logprobs: list[float] = field(default_factory=list)  # of the rollout engine, one per token; none where the environment wrote
    finish: Literal["stop", "length"] | None = None  # sampling met a token that ends a turn (the last one here), or its limit
    version: int = 0  # of the weights it was sampled with: steps that the policy had learned
    switches: list[tuple[int, int]] = field(default_factory=list)  # position from which on tokens are of newer weights, and their version
    engine: str = field(default="", compare=False)  # that sampled it; which one changes no token
    pictures: tuple[Any, ...] = ()  # chat.pictures.Picture, in the order of their tokens; where the environment wrote
    # Experts that the engine's routers chose [tokens, layers with experts, experts of a token], for as many of the tokens before the last
    # one of this turn, which it never read: those of earlier turns and of the prompt too. uint8 or int16, the largest number for none.
    experts: np.ndarray | None = field(default=None, compare=False, repr=False)

    @property
    def sampled(self) -> bool:
        """Whether the policy wrote it, and learns from it."""
        return bool(self.logprobs)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Versions of the weights that it was sampled with, in order, and how many tokens each sampled."""
        starts = [(0, self.version), *self.switches, (len(self.token_ids), 0)]
        return [(version, until - at) for (at, version), (until, _) in pairwise(starts)]

    @property
    def versions(self) -> list[int]:
        """Of the weights that each token was sampled with."""
        return [version for version, tokens in self.spans for _ in range(tokens)]


@dataclass(slots=True)
class Episode:
    """What came of one prompt: mostly one sampled turn; with an environment several, in turn. Each token follows on all before it."""

    prompt: Prompt
    group: int  # position of its prompt in the step's batch; episodes of one group are compared with each other
    turns: list[Turn]
    text: str = ""  # what is scored: the decoded answer without special tokens
    reward: float = 0.0
    terms: dict[str, float] = field(default_factory=dict)  # what the reward was made of, before weights; empty for a single number
    failed: bool = False  # its reward could not be computed
    baseline: float = 0.0  # with remax, the reward of the greedy answer to its prompt
    part: int = 0  # where an environment rewrote the history there are several sequences with the same reward: the number of this one
    limited: bool = False  # a limit ended it
    metrics: dict[str, float] = field(default_factory=dict)  # what its environment counted
    commands: list[list[str]] = field(default_factory=list)  # what was asked of its sandbox, each with a digest of what came of it

    @property
    def response_ids(self) -> list[int]:
        """All tokens after the prompt."""
        return self.turns[0].token_ids if len(self.turns) == 1 else [i for turn in self.turns for i in turn.token_ids]

    @property
    def logprobs(self) -> list[float]:
        """One per response token; 0 where the environment wrote."""
        return [p for turn in self.turns for p in turn.logprobs or [0.0] * len(turn.token_ids)]

    @property
    def mask(self) -> list[int]:
        """One per response token: 1 where the policy wrote it."""
        return [int(turn.sampled) for turn in self.turns for _ in turn.token_ids]

    @property
    def pictures(self) -> tuple[Any, ...]:
        """Of its prompt and of all turns, in the order of their tokens."""
        return self.prompt.pictures + tuple(one for turn in self.turns for one in turn.pictures)

    @property
    def finish_reason(self) -> Literal["stop", "length"] | None:
        """How the policy's last turn ended."""
        return next((turn.finish for turn in reversed(self.turns) if turn.sampled), None)

    @property
    def finished(self) -> bool:
        """Whether the policy ended its last turn itself, and the token limit did not."""
        return self.finish_reason == "stop"


@dataclass(frozen=True)
class Denominators:
    """What a loss over a global batch is divided by; the same on every rank and for every micro-batch of an optimizer step."""

    tokens: float  # tokens with mask 1, all ranks
    sequences: float  # sequences with at least one such token, all ranks
    lengths_E: torch.Tensor  # tokens with mask 1 of each sequence that `episode_N` may name (those of this rank, or all)
    limit: float = 1.0  # tokens that a sequence may have


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
    # Of sequences with pictures: where each begins in (R*L) and how long it is, row by row, and its pictures (chat.pictures.Picture).
    seen_S: tuple[tuple[int, int, tuple[Any, ...]], ...] = ()
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)  # what the model is fed besides, such as pixels (models/vision.py)
    experts_RLMK: torch.Tensor | None = None  # that input tokens take, as in `Turn`; None: routers choose
    counts: Denominators | None = None  # of the optimizer step; None where nothing is learnt
    numbers: dict[str, float] = field(default_factory=dict)  # of the step, such as kl_coef
    # Its hidden states (N, D), the parameters of its output head, and what follows after that.
    teacher: tuple[torch.Tensor, list[torch.Tensor], Callable[[torch.Tensor], torch.Tensor]] | None = None

    def to(self, device: torch.device) -> Batch:
        """The same micro-batch on another device."""
        moved: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, value in moved.items():
            if hasattr(value, "device"):
                moved[name] = value.to(device, non_blocking=True)
        for name in ("tokens_N", "inputs"):
            moved[name] = {key: value.to(device, non_blocking=True) for key, value in getattr(self, name).items()}
        return Batch(**moved)
