"""Seconds of a step, by what they were spent on."""

from __future__ import annotations

import time

from trainer.cluster import spans
from trainer.online.roles import Rollout


class Clock:
    """Runs from when it is made."""

    def __init__(self) -> None:
        self.begin = self.at = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """What passed since the last one was spent on `name`."""
        now = time.perf_counter()
        key = f"seconds_{name}"
        self.laps[key], self.at = self.laps.get(key, 0.0) + now - self.at, now
        spans.lap(name)

    def report(self, rollout: Rollout) -> dict[str, float]:
        """All laps, and rates: of all tokens, and of those that were sampled."""
        seconds, generated = time.perf_counter() - self.begin, float(rollout.flat.mask_N.sum())
        rates = {"tokens_per_second": rollout.tokens / seconds, "generated_tokens_per_second": generated / seconds}
        return {"seconds": seconds, **self.laps, **rates}
