"""What a checkpoint holds of one rank, as it was at one step, in CPU memory."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass
class Snapshot:
    """What a rank has to write of a checkpoint, while the engine trains on."""

    files: dict[str, Any]  # by path below the folder
    save: Callable[[Any, str], None]

    def write(self, folder: Path) -> None:
        for name, state in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            self.save(state, str(folder / name))


class Memory:
    """Copies tensors into CPU memory that is kept from one checkpoint to the next: pages that are new cost more than the copy."""

    def __init__(self) -> None:
        self.free: dict[Any, list[torch.Tensor]] = defaultdict(list)
        self.used: list[torch.Tensor] = []

    def reuse(self) -> None:
        """What was copied until now is not needed any more."""
        for tensor in self.used:
            self.free[tensor.shape, tensor.dtype].append(tensor)
        self.used = []

    def copy(self, state: Any, seen: dict[Any, torch.Tensor] | None = None) -> Any:
        """The same state with copies of its tensors; those that are the same one, such as tied weights, stay that."""
        seen = {} if seen is None else seen
        if isinstance(state, torch.Tensor):
            same = (state.untyped_storage().data_ptr(), state.storage_offset(), state.shape, state.stride(), state.dtype)
            if same not in seen:
                seen[same] = self._copy(state.detach())
            return seen[same]
        if isinstance(state, dict):
            copy = {key: self.copy(value, seen) for key, value in state.items()}
            return OrderedDict(copy) if isinstance(state, OrderedDict) else copy
        if type(state) in (list, tuple):
            return type(state)(self.copy(value, seen) for value in state)
        return deepcopy(state)

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        spare = self.free[tensor.shape, tensor.dtype]
        copy = spare.pop() if spare else torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self.used.append(copy)
        return copy.copy_(tensor)
