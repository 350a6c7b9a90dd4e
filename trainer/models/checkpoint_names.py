"""A model's parameters as its checkpoints have them: transformers renames and fuses some where it loads, such as experts.

Runs in rollout engines, whose vLLM reads the names and shapes of checkpoints alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from transformers.core_model_loading import revert_weight_conversion

from trainer.models import saved_tensors

Named = list[tuple[str, torch.Tensor]]
EXPERT = re.compile(r"\.experts\.(\d+)\.")


class CheckpointNames:
    """The way back, for any part of a model at a time; parts of one checkpoint's tensor wait for one another."""

    def __init__(self, lm: Any):
        """`lm` may be on the device meta."""
        self.lm = lm
        self.group = {name: _first(lm, name, tensor) for name, tensor in saved_tensors(lm).items()}
        self.size = Counter(self.group.values())
        self.waiting: dict[str, dict[str, torch.Tensor]] = {}  # by group

    def restore(self, bucket: Named) -> Iterator[tuple[str, torch.Tensor]]:
        """What is complete with this bucket, as `save_pretrained` would write it; views of the bucket where that is possible."""
        for part, tensor in bucket:
            name, rows = rows_of(part)
            if rows:
                for known, one in revert_weight_conversion(self.lm, {name: tensor}).items():
                    yield _shifted(known, rows.start), one
                continue
            group = self.group[name]
            together = self.waiting.setdefault(group, {})
            together[name] = tensor
            if len(together) == self.size[group]:
                yield from revert_weight_conversion(self.lm, self.waiting.pop(group)).items()
        for together in self.waiting.values():  # the bucket's memory is used again
            together |= {name: tensor.clone() for name, tensor in bucket if name in together}


def rows_of(name: str) -> tuple[str, slice | None]:
    """Of a part that a weight sync's plan names, such as `experts.down_proj[16:32]`, the whole's name and its rows; None for the whole."""
    found = re.fullmatch(r"(.+)\[(\d+):(\d+)\]", name)
    return (found[1], slice(int(found[2]), int(found[3]))) if found else (name, None)


def apart(lm: Any, name: str, shape: tuple[int, ...]) -> bool:
    """Whether each row of a parameter, by transformers' name, is tensors of its own in a checkpoint: the experts of most families are."""
    if len(shape) < 3:
        return False
    one, two = ([*revert_weight_conversion(lm, {name: torch.empty((rows, *shape[1:]), device="meta")})] for rows in (1, 2))
    return len(two) == 2 * len(one) and all(EXPERT.search(known) for known in two)


def _shifted(name: str, first: int) -> str:
    """Of the expert that follows so many."""
    return EXPERT.sub(lambda found: f".experts.{int(found[1]) + first}.", name)


def _first(lm: Any, name: str, tensor: torch.Tensor) -> str:
    """Of the checkpoint's names that this one has a part in; it shares them with others, as q, k and v of one tensor do."""
    return min(revert_weight_conversion(lm, {name: tensor.to("meta")}))
