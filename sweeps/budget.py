"""What a sweep may spend: USD, GPU hours, or both, counted from the seconds of its trials."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Budget:
    price: float | None = None  # USD an hour of one trial
    gpus: float = 0.0  # of one trial
    usd: float | None = None
    gpu_hours: float | None = None

    def crossed(self, seconds: float) -> bool:
        hours = seconds / 3600
        over_usd = self.usd is not None and self.price is not None and hours * self.price >= self.usd
        return over_usd or (self.gpu_hours is not None and hours * self.gpus >= self.gpu_hours)

    def cost(self, seconds: float) -> float | None:
        """USD; None where nobody said the price."""
        return None if self.price is None else seconds / 3600 * self.price

    def amount(self, seconds: float) -> str:
        """In the units of the limits."""
        hours = seconds / 3600
        words = [f"{hours * (self.price or 0):.2f} USD"] if self.usd is not None else []
        words += [f"{hours * self.gpus:.2f} GPU hours"] if self.gpu_hours is not None else []
        return " and ".join(words)

    def shown(self, seconds: float) -> str:
        hours = seconds / 3600
        words = [f"{hours * (self.price or 0):.2f} of {self.usd:g} USD"] if self.usd is not None else []
        words += [f"{hours * self.gpus:.2f} of {self.gpu_hours:g} GPU hours"] if self.gpu_hours is not None else []
        return f"{' and '.join(words)} are spent"
