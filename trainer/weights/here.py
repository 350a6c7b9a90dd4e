"""The broadcasts of a weight sync among objects of one process, which are called one after another, the sender first."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch


class Handover:
    """What was sent and not taken yet, by member."""

    def __init__(self, world: int):
        self.sent: list[deque[torch.Tensor]] = [deque() for _ in range(world)]

    def member(self, rank: int) -> Member:
        return Member(self, rank)


@dataclass
class Member:
    """In place of torch's process group; `wait` in place of its works."""

    handover: Handover
    rank: int

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Member:
        [tensor] = tensors
        if self.rank == options.rootRank:
            copy = tensor.clone()
            for rank, sent in enumerate(self.handover.sent):
                if rank != self.rank:
                    sent.append(copy)
        elif not self.handover.sent[self.rank]:
            raise RuntimeError("nothing was sent")
        else:
            tensor.copy_(self.handover.sent[self.rank].popleft())
        return self

    def wait(self) -> None:
        pass

    def abort(self) -> None:
        pass
