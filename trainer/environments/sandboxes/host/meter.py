"""What a pool counts, as Prometheus reads it."""

from __future__ import annotations

from collections import Counter
from typing import Any

BOUNDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)  # seconds
NOW = {
    "room": "Sandboxes that this node may have at a time.",
    "ready": "Sandboxes that wait for an episode.",
    "to_keep": "Sandboxes that are to be ready: warm, or less where that leaves no room.",
    "in_use": "Sandboxes of episodes, and those that are ending.",
    "waiting": "Episodes that wait for room.",
}
COUNTS = {
    "leases": "Sandboxes that episodes were given.",
    "cold": "Of these, those that were made when they were asked for.",
    "expired": "Sandboxes whose owner had died or was silent.",
    "failed": "Sandboxes that could not be made.",
}
LIMITS = {"memory", "processes", "timeout"}


class Meter:
    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.limited: Counter[str] = Counter()
        self.buckets: Counter[float] = Counter()
        self.seconds, self.first = 0.0, 0

    def first_command(self, seconds: float) -> None:
        self.seconds, self.first = self.seconds + seconds, self.first + 1
        for bound in BOUNDS:
            self.buckets[bound] += seconds <= bound

    def text(self, now: dict[str, int]) -> str:
        lines: list[str] = []
        for name, about in NOW.items():
            lines += [*_head(name, about, "gauge"), f"flotilla_sandboxes_{name} {now[name]}"]
        for name, about in COUNTS.items():
            lines += [*_head(f"{name}_total", about, "counter"), f"flotilla_sandboxes_{name}_total {self.counts[name]}"]
        about = "Commands that were ended at their deadline; sandboxes in which memory or processes ran out."
        lines += _head("limited_total", about, "counter")
        lines += [f'flotilla_sandboxes_limited_total{{limit="{limit}"}} {self.limited[limit]}' for limit in sorted(LIMITS)]
        name = "first_command_seconds"
        lines += _head(name, "From the request for a sandbox to the end of its first command.", "histogram")
        lines += [f'flotilla_sandboxes_{name}_bucket{{le="{bound}"}} {self.buckets[bound]}' for bound in BOUNDS]
        lines += [f'flotilla_sandboxes_{name}_bucket{{le="+Inf"}} {self.first}', f"flotilla_sandboxes_{name}_sum {self.seconds:.6f}"]
        return "\n".join([*lines, f"flotilla_sandboxes_{name}_count {self.first}", ""])

    def summary(self) -> dict[str, Any]:
        mean = self.seconds / self.first if self.first else None
        return {
            **{name: self.counts[name] for name in COUNTS},
            "limited": {name: self.limited[name] for name in LIMITS},
            "first_seconds": mean,
        }


def _head(name: str, about: str, kind: str) -> list[str]:
    return [f"# HELP flotilla_sandboxes_{name} {about}", f"# TYPE flotilla_sandboxes_{name} {kind}"]
