"""Checkpoints of ranks that nobody drives: they agree among themselves."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from trainer.checkpoints.background import Background
from trainer.checkpoints.folders import Checkpoints
from trainer.errors import RunError
from trainer.ranks.worker import Worker

T = TypeVar("T")


def from_rank_0(look: Callable[[], T], rank: int, world: int) -> T:
    """What rank 0 found, on every rank."""
    found: list[Any] = [look() if rank == 0 else None]
    if world > 1:
        dist.broadcast_object_list(found, src=0)
    return found[0]


def gather(mine: T, world: int) -> list[T]:
    """What every rank has, on all of them."""
    if world == 1:
        return [mine]
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, mine)
    return everyone


def barrier(world: int) -> None:
    if world > 1:
        dist.barrier()


def _any_rank(flags: list[bool], world: int, device: torch.device) -> list[bool]:
    """Each is True on all ranks if it is on one: a signal may reach only some."""
    if world == 1:
        return flags
    summed = torch.tensor(flags, dtype=torch.float32, device=device)
    dist.all_reduce(summed)
    return [bool(flag) for flag in summed.tolist()]


class Saver:
    """All ranks write their shards, each in a thread of its own, into the folder that rank 0 opens and completes."""

    def __init__(self, worker: Worker, checkpoints: Checkpoints, rank: int, world: int) -> None:
        self.worker, self.checkpoints, self.rank, self.world = worker, checkpoints, rank, world
        self.background = Background(checkpoints, worker.config.trainer.timeout)
        self.everywhere = Event()  # on rank 0: the other ranks have written
        self.step = 0
        self.blocked: dict[str, float] = {}  # seconds that `save` held this rank up, until the next `look`

    def look(self, stop: bool, seconds: float = 0) -> list[bool]:
        """`stop`, and whether shards are unwritten after `seconds`; both of any rank. Collective. Raises what went wrong on this rank."""
        self.background.check()
        self.blocked = {}
        try:
            busy = not self.worker.saved(seconds)
        except Exception as error:
            if self.rank > 0:
                raise self.checkpoints.explained(error, self.step) or error from None
            self.background.wait()  # raises the same, explained, once the folder is removed
            raise
        stop, busy = _any_rank([stop, busy], self.world, self.worker.device)
        if not busy:
            self.everywhere.set()
        return [stop, busy]

    def save(self, step: int, state: dict[str, Any], last: bool) -> None:
        """Begin a checkpoint; the `last` is complete on return. Collective."""
        begin = time.perf_counter()
        if self.look(False, self.background.timeout)[1]:
            raise RunError(f"the checkpoint of step {self.step} was not written within {self.background.timeout} s (trainer.timeout)")
        self.background.wait()
        self.background.tell(begin)
        self.everywhere.clear()
        self.step = step
        if self.rank == 0:
            expected = [f"random-{i}.pt" for i in range(self.world)]
            self.background.write(step, state, self._begin, self._written, expected=expected)
        else:
            self._begin(self.checkpoints.draft(step))
        if last:
            self.look(False, self.background.timeout)
            self.background.wait()
            barrier(self.world)
        self.blocked = {"seconds_checkpoint": time.perf_counter() - begin}

    def _begin(self, draft: Path) -> None:
        barrier(self.world)  # it is there
        self.worker.save_shard(draft)

    def _written(self) -> bool:
        return self.worker.saved() and (self.world == 1 or self.everywhere.is_set())
