"""A copy of the policy's weights in Ray's object store, for rollout engines outside the sync group.

Rank 0 puts each bucket there as it gathers it, so that the whole model is in no other memory of its; nodes fetch buckets from it or from
any node that has them. Who has the version before may fetch the changes alone (trainer/weights/deltas.py).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch

from trainer import weights
from trainer.weights import deltas


@dataclass(frozen=True)
class Published:
    """References to the buckets of one version, in the order of the plan."""

    version: int
    whole: tuple[Any, ...]  # of bytes
    changes: tuple[Any, ...]  # of deltas since `before`; None where the whole bucket is smaller
    before: int | None
    bytes: int  # that who has the version before fetches
    changed: float  # share of all weights


@dataclass
class Publisher:
    version: int
    last: Published | None
    whole: list[Any] = field(default_factory=list)
    changes: list[Any] = field(default_factory=list)
    bytes: int = 0
    changed: int = 0
    weights: int = 0

    def add(self, flat: torch.Tensor) -> None:
        """The next bucket."""
        import ray  # here, as runs in one process do without

        flat = flat.cpu()
        number = len(self.whole)
        self.whole.append(ray.put(to_bytes(flat)))
        self.weights += flat.numel()
        delta = deltas.diff(of_bytes(ray.get(self.last.whole[number]), flat.dtype), flat) if self.last else None
        self.changed += flat.numel() if delta is None else len(delta.positions)
        small = delta is not None and delta.bytes < flat.nbytes
        self.changes.append(ray.put(delta) if small else None)
        self.bytes += delta.bytes if delta is not None and small else flat.nbytes

    def end(self) -> Published:
        before = self.last.version if self.last else None
        return Published(self.version, tuple(self.whole), tuple(self.changes), before, self.bytes, self.changed / self.weights)


class Fetcher:
    """In a rollout engine's process: fetches what was published while the engine goes on to sample."""

    def __init__(self, plan: weights.Plan):
        self.dtypes = [getattr(torch, bucket[0].dtype) for bucket in plan]
        self.plan = plan
        self.version = -1  # of `buckets`
        self.buckets: list[torch.Tensor] = []
        self.error: Exception | None = None
        self.done = threading.Event()
        self.thread: threading.Thread | None = None

    def begin(self, published: Published) -> None:
        """One at a time; `take` comes before the next."""
        self.done.clear()
        self.thread = threading.Thread(target=self._fetch, args=(published,), daemon=True)
        self.thread.start()

    def _fetch(self, published: Published) -> None:
        import ray

        try:
            follows = published.before is not None and published.before == self.version
            buckets = []
            for i, dtype in enumerate(self.dtypes):
                if follows and published.changes[i] is not None:
                    buckets.append(deltas.apply(self.buckets[i], ray.get(published.changes[i])))
                else:
                    buckets.append(of_bytes(ray.get(published.whole[i]), dtype))
            self.buckets, self.version = buckets, published.version
        except Exception as error:
            self.error = error
        self.done.set()

    def take(self) -> list[weights.Named] | None:
        """All weights, where they have come since the last call. Raises what kept them from it."""
        if self.thread is None or not self.done.is_set():
            return None
        self.thread = None
        if self.error:
            raise self.error
        return [weights.unflatten(flat, bucket) for flat, bucket in zip(self.buckets, self.plan, strict=True)]


def to_bytes(flat: torch.Tensor) -> Any:
    """As numpy's bytes, which Ray does not copy where they are read, and which know no bfloat16."""
    return flat.contiguous().view(torch.uint8).numpy()


def of_bytes(array: Any, dtype: torch.dtype) -> torch.Tensor:
    """A copy, which may be written to."""
    return torch.tensor(array).view(dtype)
