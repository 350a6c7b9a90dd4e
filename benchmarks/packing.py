"""Packed micro-batches against padded ones on a long-tailed mix of lengths: share of real tokens, seconds, and the same gradient.

Padded is what a trainer does that pads each micro-batch to its longest sequence, with as many rows as the same token budget allows,
in the order in which the sequences come. Unpacked is one sequence at a time, without any padding: the reference for loss and gradient.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.report import Ratio, Report
from trainer import models
from trainer.configs.sections import ModelConfig
from trainer.data.packing import Sequence, attach, efficiency, pack
from trainer.models.heads import PolicyModel

SEQUENCES, LONGEST, BUDGET = 256, 512, 8192
ROUNDS, WARM_UP = 5, 1
MODEL = {
    "model_type": "qwen2",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LONGEST,
    "tie_word_embeddings": True,
}


def long_tailed(seed: int) -> list[Sequence]:
    """Prompts of ten tokens, log-normal answers; their mean is about a fifth of the longest allowed."""
    rng = random.Random(seed)
    lengths = [max(1, min(LONGEST - 10, round(rng.lognormvariate(4.2, 0.9)))) for _ in range(SEQUENCES)]
    return [Sequence([rng.randrange(3, 13) for _ in range(10)], [rng.randrange(3, 13) for _ in range(n)]) for n in lengths]


def run() -> Report:
    torch.set_num_threads(2)
    config = ModelConfig(init=MODEL, tokenizer="characters:0123456789", dtype="float32")
    policy = PolicyModel(models.load_lm(config, 0, torch.device("cpu")))
    sequences = long_tailed(0)
    total = sum(len(s.response_ids) for s in sequences)
    advantages_N = torch.randn(total, generator=torch.Generator().manual_seed(0))

    def packed() -> float:
        batches = pack(sequences, BUDGET, pad_id=0)
        attach(batches, {"advantages": advantages_N})
        return learn((-(policy(b)[0] * b.tokens_N["advantages"]).sum() / total for b in batches), policy)

    def unpacked() -> float:
        batches = [pack([s], LONGEST, pad_id=0)[0] for s in sequences]
        parts = zip(batches, advantages_N.split([len(s.response_ids) for s in sequences]), strict=True)
        return learn((-(policy(b)[0] * advantages).sum() / total for b, advantages in parts), policy)

    def padded() -> float:
        return learn(padded_losses(policy.lm, sequences, advantages_N, total), policy)

    ways: dict[str, Callable[[], float]] = {"packed": packed, "padded": padded, "unpacked": unpacked}
    losses, gradients, samples = {}, {}, {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            began = time.perf_counter()
            losses[name] = way()
            samples[name].append(time.perf_counter() - began)
            gradients[name] = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
    seconds = {name: statistics.median(values[WARM_UP:]) for name, values in samples.items()}
    largest = float(gradients["unpacked"].abs().max())
    difference = float((gradients["packed"] - gradients["unpacked"]).abs().max())
    shares = [efficiency(pack(long_tailed(seed), BUDGET, pad_id=0)) for seed in range(20)]
    return Report(
        "packing",
        [
            Ratio("real / padded tokens, mean of 20 batches", statistics.mean(shares), 0.95, "at least"),
            Ratio("gradient, largest difference to unpacked / largest entry", difference / largest, 1e-4),
            Ratio("loss, difference to unpacked", abs(losses["packed"] - losses["unpacked"]), 1e-5),
            Ratio("seconds, packed / padded", seconds["packed"] / seconds["padded"], 1.0),
        ],
        facts={
            "lengths": f"{SEQUENCES} sequences, mean {total / SEQUENCES:.0f} of at most {LONGEST - 10} response tokens",
            "real / padded tokens, worst of 20": f"{min(shares):.3f}",
            "real / padded tokens, padded": f"{padded_share(sequences):.3f}",
            "seconds": "  ".join(f"{name} {value:.3f}" for name, value in seconds.items()),
        },
        samples={"seconds": samples, "shares": shares, "losses": losses},
    )


def learn(losses: Any, policy: torch.nn.Module) -> float:
    """Forward and backward over all micro-batches; the sum of their losses."""
    policy.zero_grad()
    total = 0.0
    for loss in losses:
        loss.backward()
        total += float(loss.detach())
    return total


def padded_losses(lm: Any, sequences: list[Sequence], advantages_N: torch.Tensor, total: int) -> Any:
    """Rows of one sequence, padded on the right, so that causal attention needs no mask: the fastest way to be padded."""
    advantages = advantages_N.split([len(s.response_ids) for s in sequences])
    for at, rows in micro_batches(sequences):
        part = sequences[at : at + rows]
        columns = max(len(s.prompt_ids) + len(s.response_ids) for s in part)
        ids = torch.zeros(len(part), columns, dtype=torch.int64)
        weight = torch.zeros(len(part), columns)
        for i, s in enumerate(part):
            whole = [*s.prompt_ids, *s.response_ids]
            ids[i, : len(whole)] = torch.tensor(whole)
            weight[i, len(s.prompt_ids) : len(whole)] = advantages[at + i]
        logits = lm(input_ids=ids, use_cache=False).logits[:, :-1].float()
        logprobs = torch.log_softmax(logits, -1).gather(2, ids[:, 1:, None])[..., 0]
        yield -(logprobs * weight[:, 1:]).sum() / total


def micro_batches(sequences: list[Sequence]) -> list[tuple[int, int]]:
    """(start, rows) of micro-batches in order: as many rows as the budget allows for sequences of the longest length."""
    rows = BUDGET // LONGEST
    return [(at, min(rows, len(sequences) - at)) for at in range(0, len(sequences), rows)]


def padded_share(sequences: list[Sequence]) -> float:
    real = padded = 0
    for at, rows in micro_batches(sequences):
        lengths = [s.length for s in sequences[at : at + rows]]
        real, padded = real + sum(lengths), padded + max(lengths) * rows
    return real / padded
