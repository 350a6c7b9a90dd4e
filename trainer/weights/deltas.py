"""What changed in a bucket of weights: positions and new values, exactly. A step at a small learning rate changes few bfloat16 weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch

BITS = {2: torch.int16, 4: torch.int32}  # by bytes of a weight: compared as they are, also NaN and -0


@dataclass(frozen=True)
class Delta:
    positions: torch.Tensor  # int32 where that is enough
    values: torch.Tensor  # the bits of new values, as integers

    @property
    def bytes(self) -> int:
        return self.positions.nbytes + self.values.nbytes


def diff(before: torch.Tensor, after: torch.Tensor) -> Delta:
    """From one flat tensor to another of the same length and dtype."""
    old, new = (flat.view(BITS[flat.element_size()]) for flat in (before, after))
    positions = (old != new).nonzero()[:, 0]
    values = new[positions]
    return Delta(positions.to(torch.int32) if len(after) < 2**31 else positions, values)


def apply(before: torch.Tensor, delta: Delta) -> torch.Tensor:
    """A new tensor, bit for bit what `diff` was given as `after`."""
    after = before.clone()
    after.view(BITS[after.element_size()])[delta.positions.long()] = delta.values
    return after
