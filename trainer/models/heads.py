"""What a packed micro-batch asks of a language model: log-probabilities, values, scores. Runs in ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainer.episodes import Batch
from trainer.models.vision import arguments, barred, unsampled, unseen

# Elements of one chunk of logits (float32): 256 MiB. A vocabulary of 150,000 and 16,000 tokens would be 9.6 GiB at once.
CHUNK_ELEMENTS = 1 << 26


def capped(logits: torch.Tensor, cap: float) -> torch.Tensor:
    return torch.tanh(logits / cap) * cap


# What architectures do to the logits after the head, by the settings that say how much. Others are refused (trainer/ranks/own_logits.py).
AFTER_HEAD: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "final_logit_softcapping": capped,  # Gemma 2, 3n and 4
    "output_logit_soft_cap": capped,  # xLSTM
    "logits_soft_cap": capped,  # RecurrentGemma
    "logit_scale": torch.mul,  # Cohere
    "lm_head_multiplier": torch.mul,  # Falcon-H1
    "logits_scaling": torch.div,  # Granite
}


def after_head(lm: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """From the head's output to logits."""
    settings = lm.config.get_text_config()
    steps = [(step, value) for key, step in AFTER_HEAD.items() if (value := getattr(settings, key, None)) not in (None, 1)]

    never = unsampled(lm)

    def finish(logits: torch.Tensor) -> torch.Tensor:
        for step, value in steps:
            logits = step(logits, value)
        return barred(logits, never)

    return finish


class Head(nn.Module):
    """The output head of a language model over many tokens, as many at a time as CHUNK_ELEMENTS allows logits.

    Under ZeRO-3 every call of the head would gather its weights on all ranks, whose chunks differ in number. So they are gathered for a
    call of this module, once a micro-batch: `borrowed` names them to `engine.Engine`.
    """

    def __init__(self, lm: Any):
        super().__init__()
        self.of = (lm.get_output_embeddings(),)  # no submodule: its parameters are the language model's
        self.vocabulary: int = lm.config.get_text_config().vocab_size
        self.finish = after_head(lm)

    @property
    def borrowed(self) -> list[nn.Parameter]:
        return [*self.of[0].parameters()]

    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """[N, V], float32; only within `forward`."""
        return self.finish(self.of[0].forward(hidden_ND).float())  # not a call, which would gather

    def forward(self, function: Callable[..., tuple[torch.Tensor, ...]], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What `function` makes of `tensors`, some tokens at a time; they and its results begin with the axis N."""
        rows = max(1, CHUNK_ELEMENTS // self.vocabulary)
        if tensors[0].size(0) <= rows:
            return function(*tensors)
        parts = [checkpoint(function, *some, use_reentrant=False) for some in zip(*(t.split(rows) for t in tensors), strict=True)]
        return tuple(map(torch.cat, zip(*parts, strict=True)))


class PolicyModel(nn.Module):
    """A causal language model that returns log-probabilities (N,) and entropies (N,) of the batch's targets."""

    def __init__(self, lm: Any, temperature: float = 1.0, learn_entropy: bool = False):
        super().__init__()
        self.lm = lm
        self.head = Head(lm)
        self.temperature = temperature
        self.learn_entropy = learn_entropy
        self.own: dict[str, Any] | None = None

    @contextmanager
    def by_itself(self, **fed: Any) -> Iterator[None]:
        """`forward` gives log-probabilities of the logits that the language model itself computes, also `fed` with this; for few tokens."""
        self.own = fed
        try:
            yield
        finally:
            self.own = None

    def forward(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        if self.own is not None:
            logits = self.lm(input_ids=batch.input_ids_RL, use_cache=False, **self.own).logits.flatten(0, 1)[batch.index_N].float()
            logits = barred(logits, unsampled(self.lm))
            return self.of_targets((logits / self.temperature).log_softmax(-1), batch.target_N)
        return self.head(self._score, hidden_states(self.lm, batch), batch.target_N)

    def logprobs(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """Of every token of the vocabulary [N, V], float32."""
        return torch.log_softmax(self.head.logits(hidden_ND) / self.temperature, -1)

    def _score(self, hidden_ND: torch.Tensor, target_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.of_targets(self.logprobs(hidden_ND), target_N)

    def of_targets(self, logprobs_NV: torch.Tensor, target_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability of each target, and the entropy there, [N] both."""
        # Mostly entropy is only watched: without a graph it costs no memory in the backward pass.
        with torch.set_grad_enabled(self.learn_entropy and torch.is_grad_enabled()):
            entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
        return logprobs_NV.gather(1, target_N[:, None])[:, 0], entropy_N


class ValueModel(nn.Module):
    """The backbone with a scalar head: the expected return (N,) before each target token is written."""

    def __init__(self, lm: Any):
        super().__init__()
        self.lm = lm
        like = next(lm.parameters())
        head = nn.Linear(lm.config.get_text_config().hidden_size, 1, bias=False, dtype=like.dtype, device=like.device)
        nn.init.zeros_(head.weight)  # starts at "no idea" instead of at noise
        self.lm.set_output_embeddings(head)

    def forward(self, batch: Batch) -> tuple[torch.Tensor]:
        return (self.lm.get_output_embeddings()(hidden_states(self.lm, batch))[:, 0].float(),)


class ScoreModel(nn.Module):
    """A classifier of one output: what it says (N,) before each target token, all of which it has read by the last.

    transformers' own class for the architecture, as it loads and saves it; it looks at the last token alone.
    """

    def __init__(self, lm: Any):
        super().__init__()
        self.lm = lm

    def forward(self, batch: Batch) -> tuple[torch.Tensor]:
        return (self.lm.score(hidden_states(self.lm, batch))[:, 0].float(),)


def backbone(lm: Any) -> Any:
    """What computes hidden states. Llama 4's names are such that its base_model is the whole of it."""
    return lm.base_model if lm.base_model is not lm else lm.model


def hidden_states(lm: Any, batch: Batch) -> torch.Tensor:
    """Hidden states (N, D) that predict the targets.

    No attention mask is given: transformers reads the borders of packed sequences from position ids that restart
    (`masking_utils.find_packed_sequence_indices`); with one sequence per row causal attention is right by itself, and then
    leaving the position ids out keeps its fast path.
    """
    core, positions = backbone(lm), batch.position_ids_RL if batch.packed else None
    if positions is not None and hasattr(core, "get_rope_index"):  # or it would not look for borders, in texts alone either
        positions = positions.expand(4, *positions.shape)
    given = {"position_ids": positions, **arguments(core, batch.inputs)}
    hidden = core(input_ids=batch.input_ids_RL, use_cache=False, **given).last_hidden_state
    if batch.inputs:
        hidden = hidden + unseen(core, batch.inputs)
    return hidden.flatten(0, 1)[batch.index_N]
