"""What --monitoring says: monitoring/ runs it."""

from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass(frozen=True)
class Monitoring:
    """What the stack says, in JSON by these names; durations in seconds but retention, which is Prometheus's own."""

    prometheus_port: int
    grafana_port: int
    retention: str
    exporters: tuple[int, ...]
    webhook: str | None
    idle_gpu: int
    idle_percent: int
    silent_trainer: int
    full_disk: int
    repeat: int
    price: float | None = None  # USD an hour of all nodes

    @classmethod
    def of(cls, text: str) -> Monitoring | None:
        """Raises ValueError."""
        if not text:
            return None
        try:
            given = json.loads(text)
            return cls(**given | {"exporters": tuple(given["exporters"])})
        except (TypeError, KeyError, json.JSONDecodeError) as error:
            raise ValueError(f"--monitoring {text!r} is not JSON of its settings: {error}") from None
