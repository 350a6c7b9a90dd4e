"""In words: which metrics moved at a step, which prompts teach nothing."""

from __future__ import annotations

import statistics
from itertools import pairwise
from typing import Any

from .metrics import Metrics, number

WINDOW = 10  # steps on each side
SHARP = 5  # steps on each side of a jump
LEAST = 3  # steps on each side, or nothing can be said
SIGNIFICANT = 4.0  # by how many times its own noise a metric's level has to move
JUMP = 5.0  # by how many times the usual change between two steps a level has to jump
SHOWN = 12
TIMES = ("tokens_per_second", "generated_tokens_per_second", "cost_usd", "seconds")  # of the machine rather than of learning
MEANINGS = {
    "truncated": "answers are cut off by rollout.max_new_tokens",
    "response_tokens": "answers' length changed",
    "entropy": "the policy is less or more certain",
    "grad_norm": "updates became larger or smaller",
    "kl": "the policy moved away from the reference",
    "clipped": "more or fewer tokens hit the clip range",
    "logprob_diff": "engines and policy disagree: look at weight sync and precision",
    "rerouted": "the policy's routers would choose other experts than the engine's did",
    "no_signal": "more or fewer groups have equal rewards, which teach nothing",
    "reward_failed": "rewards could not be computed",
    "lr": "the learning rate changed",
    "staleness": "samples are older or newer",
    "skipped": "optimizer steps were skipped because of their gradient",
}


def moved(metrics: Metrics, step: int) -> list[dict[str, Any]]:
    """Metrics whose level changed at a step, the surest first: mean before and from it on, and by how many times their noise."""
    found = []
    for key in metrics.columns:
        pairs = [*metrics.pairs(key, step - WINDOW, step + WINDOW - 1)]
        old, new = [value for at, value in pairs if at < step], [value for at, value in pairs if at >= step]
        if min(len(old), len(new)) < LEAST:
            continue
        before, after = statistics.fmean(old), statistics.fmean(new)
        (rise, noise), (rise_after, noise_after) = trend(old), trend(new)
        anyway = (rise + rise_after) / 2 * (len(old) + len(new)) / 2  # what the metric gains or loses between the middles of both
        noise = max(noise, noise_after, 1e-9 + 1e-3 * abs(before))
        score = abs(after - before - anyway) / noise
        trending = 0 < (after - before) * anyway < 2 * anyway**2
        if score >= (SIGNIFICANT / 2 if key.startswith("reward") else SIGNIFICANT) and abs(after - before) > noise and not trending:
            found.append({"key": key, "before": number(before), "after": number(after), "score": round(min(score, 999.0), 1)})
    for row in found:
        row["meaning"] = MEANINGS.get(row["key"].partition("/")[0], "")
    return sorted(found, key=lambda row: (row["key"] in TIMES or row["key"].startswith("seconds"), -row["score"]))[:SHOWN]


def trend(values: list[float]) -> tuple[float, float]:
    """The slope of a line through them, per step, and how far they are from it (standard deviation)."""
    slope, start = statistics.linear_regression(range(len(values)), values)
    return slope, statistics.pstdev(value - start - slope * i for i, value in enumerate(values))


def breaks(metrics: Metrics, key: str, most: int = 5) -> list[dict[str, Any]]:
    """Steps at which the level of a metric jumped, the largest jumps first: where to look. What it gains over many steps is none."""
    pairs = [*metrics.pairs(key)]
    size = max(LEAST, min(SHARP, len(pairs) // 8))
    if len(pairs) < 2 * size + 1:
        return []
    values = [value for _, value in pairs]
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    level = [(sums[i] - sums[i - size], sums[i + size] - sums[i]) for i in range(size, len(values) - size + 1)]
    jumps = [(after - before) / size for before, after in level]
    noise = statistics.median(abs(b - a) for a, b in pairwise(values)) or 1e-9
    usual = statistics.median(jumps)  # as it is learned
    sizes = [min(abs(jump), abs(jump - usual)) for jump in jumps]
    found: list[dict[str, Any]] = []
    for i in sorted(range(len(jumps)), key=lambda i: -sizes[i]):
        at = pairs[i + size][0] if i + size < len(pairs) else pairs[-1][0]
        if sizes[i] < JUMP * noise or len(found) == most:
            break
        if all(abs(at - other["step"]) > WINDOW for other in found):
            found.append({"step": at, "by": number(jumps[i])})
    return found
