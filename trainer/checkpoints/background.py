"""A checkpoint is written while the next steps run: the ranks copy it to memory, which is all that the next optimizer step waits for."""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from threading import Event, Thread
from typing import Any, Self

import torch

from trainer.checkpoints.folders import CheckpointError, Checkpoints
from trainer.errors import RunError

POLL = 0.1  # seconds between two looks whether the ranks have written
LONG = 5  # seconds of waiting worth a line
GRACE = 20  # seconds that a checkpoint gets to be completed when the run fails


class Memory:
    """CPU memory for copies. It is kept from one checkpoint to the next: to get new pages takes longer than the copy."""

    def __init__(self) -> None:
        self.free: dict[int, list[torch.UntypedStorage]] = defaultdict(list)  # by size
        self.used: list[torch.UntypedStorage] = []
        self.owed: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []  # copies that are still empty, and of what

    def reuse(self) -> None:
        """What was copied until now is not needed any more."""
        for storage in self.used:
            self.free[storage.nbytes()].append(storage)
        self.used = []

    def place(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Where `fill` copies it to."""
        spare, size = self.free[storage.nbytes()], storage.nbytes()
        pinned = storage.device.type == "cuda"  # else the device copies into it by way of another buffer
        copy = spare.pop() if spare else torch.empty(size, dtype=torch.uint8, pin_memory=pinned).untyped_storage()
        self.used.append(copy)
        self.owed.append((copy, storage))
        return copy

    def fill(self) -> None:
        """Copy all that has a place. Until then nothing may write to the originals."""
        while self.owed:
            copy, storage = self.owed.pop()
            copy.copy_(storage)


def snapshot(state: Any, memory: Memory) -> Any:
    """A copy of nested dicts, lists and objects, whose tensors `memory.fill` copies; those that share memory share it in the copy too."""
    storages: dict[int, torch.UntypedStorage] = {}

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in storages:
            storages[storage.data_ptr()] = memory.place(storage)
        place = storages[storage.data_ptr()], tensor.storage_offset(), tensor.size(), tensor.stride()
        return torch.empty(0, dtype=tensor.dtype).set_(*place)

    return copy.deepcopy(state, {id(tensor): copied(tensor) for tensor in _tensors(state)})


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, Mapping):
        for value in state.values():
            yield from _tensors(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _tensors(value)


class Background:
    """Completes the checkpoints of a run, one at a time. `timeout`: seconds that one may take."""

    def __init__(self, checkpoints: Checkpoints, timeout: float) -> None:
        self.checkpoints, self.timeout = checkpoints, timeout
        self._thread: Thread | None = None
        self._error: BaseException | None = None
        self._given_up = Event()
        self._step = 0

    def write(
        self,
        step: int,
        state: dict[str, Any],
        begin: Callable[[Path], None],
        written: Callable[[], bool],
        *,
        score: float | None = None,
        expected: Iterable[str] = (),
    ) -> None:
        """Return when `begin`, called with the folder to write into, has copied; the checkpoint is complete once `written` says so.

        state, score, expected: as `Checkpoints.writing` takes them. Waits for the checkpoint before this one. Raises as `wait` does.
        """
        called = time.perf_counter()
        self.wait()
        self.tell(called)
        with ExitStack() as stack:
            draft = stack.enter_context(self.checkpoints.writing(step, state, score=score, expected=expected))
            begin(draft)
            opened = stack.pop_all()
        self._step = step
        self._thread = Thread(target=self._complete, args=(opened, written, step), name="checkpoint", daemon=True)
        self._thread.start()

    def tell(self, begin: float) -> None:
        """Say so if the checkpoint before was waited for since `begin` (time.perf_counter) for long."""
        if (waited := time.perf_counter() - begin) > LONG:
            print(f"waited {waited:.0f} s for the checkpoint before: raise trainer.checkpoint_every to train meanwhile", flush=True)

    def _complete(self, opened: ExitStack, written: Callable[[], bool], step: int) -> None:
        try:
            with opened:
                while not written():
                    if self._given_up.wait(POLL):
                        raise RunError(f"the checkpoint of step {step} was given up")
            print(f"checkpoint: {self.checkpoints.folder / f'step_{step}'}", flush=True)
        except BaseException as error:
            self._error = error

    def check(self) -> None:
        """Raise what went wrong with a checkpoint since it was begun; CheckpointError where the disk is full, or the folder refuses."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wait(self) -> None:
        """Return once the checkpoint that is being written is durable. Raises as `check` does, and RunError at the deadline."""
        if self._thread is not None:
            self._thread.join(self.timeout)
            if self._thread.is_alive():
                raise RunError(f"the checkpoint of step {self._step} was not written within {self.timeout:g} s (trainer.timeout)")
            self._thread = None
        self.check()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for the checkpoint that is being written; after an error for GRACE seconds, and the error is what is reported."""
        if kind is None:
            self.wait()
        elif self._thread is not None:
            self._thread.join(0 if issubclass(kind, CheckpointError) else GRACE)
            self._given_up.set()
            self._thread.join(GRACE)
