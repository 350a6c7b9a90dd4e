"""A model's parameters as its checkpoints have them: transformers renames and fuses some where it loads, such as experts.

Runs in rollout engines, whose vLLM reads the names and shapes of checkpoints alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from transformers.core_model_loading import revert_weight_conversion

from trainer.models import saved_tensors

Named = list[tuple[str, torch.Tensor]]


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
        for name, tensor in bucket:
            group = self.group[name]
            together = self.waiting.setdefault(group, {})
            together[name] = tensor
            if len(together) == self.size[group]:
                yield from revert_weight_conversion(self.lm, self.waiting.pop(group)).items()
        for together in self.waiting.values():  # the bucket's memory is used again
            together |= {name: tensor.clone() for name, tensor in bucket if name in together}


def _first(lm: Any, name: str, tensor: torch.Tensor) -> str:
    """Of the checkpoint's names that this one has a part in; it shares them with others, as q, k and v of one tensor do."""
    return min(revert_weight_conversion(lm, {name: tensor.to("meta")}))
