"""Who starts the objects that a run is made of (ranks, rollout engines, environments), and waits for what they answer.

`placement.processes=ray` makes each a process (trainer/cluster/on_ray.py). With `one` all are objects of the run's own process, for
breakpoints, debuggers and profilers. The same calls in the same order, so the same bits.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator, MutableMapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Protocol
from weakref import WeakValueDictionary

import numpy as np
import torch

from trainer.cluster.placement import Bundle, Placement, plan
from trainer.cluster.spans import register
from trainer.configs.ppo import PpoConfig
from trainer.errors import RunError

if TYPE_CHECKING:
    from trainer.cluster.heartbeat import Watch


class Launcher(Protocol):
    """`handle.method.remote(*args)` of what `start` returns begins a call, and returns a reference to its result."""

    plan: Placement
    errors: ClassVar[tuple[type[Exception], ...]]  # that `wait` raises where a process may have died
    recorded: MutableMapping[str, Any]  # what is there of objects with a lane in the timeline, by name
    spans: str | None  # what the keys begin with under which processes publish what they recorded; None where there is but this one

    def start(
        self,
        kind: type,
        *args: Any,
        share: Bundle,
        threads: int,
        name: str | None = None,
        where: int | str | None = None,
        beside: tuple[str, ...] = (),
    ) -> Any:
        """An object of this class, with `share` of a bundle (its position in the plan), of a node (its id), or of any node.

        Calls are answered in their order; those to the methods `beside` while another one is at work.
        """
        ...

    def ask(self, function: Callable[..., Any], *args: Any, share: Bundle, where: int) -> Any:
        """A reference to what a function returns there."""
        ...

    def watch(self, actor: Any, limit: float, silence: float | None = None) -> None:
        """Have it give signs of life from now on (heartbeat.begin)."""
        ...

    def doing(self) -> dict[str, str]:
        """What each of `recorded` that gives signs of life does now, by name; call it every heartbeat.EVERY seconds."""
        ...

    def wait(self, refs: Any, seconds: float, what: str) -> Any:
        """Results. Raises RunError naming `what` where a process died, fell silent or did not answer in time; errors of a person's own code
        and settings as they were raised."""
        ...

    def get(self, ref: Any) -> Any:
        """The result of a call that is done."""
        ...

    def done(self, refs: list[Any], seconds: float = 0.0, count: int | None = None) -> tuple[list[Any], list[Any]]:
        """Those that are, once `count` (all) of them are or so many seconds have passed; and the others."""
        ...

    def died(self, ref: Any) -> bool:
        """Whether a call that has ended, or has not begun, was made to a process that is gone."""
        ...

    def is_death(self, error: Exception) -> bool:
        """Whether `get` raised this because the process is gone."""
        ...

    def end(self, actor: Any) -> None:
        """At once, whatever it does."""
        ...

    def end_silent(self, refs: list[Any], watch: Watch) -> list[str]:
        """End those that owe answers to these calls and are silent; call it every heartbeat.EVERY seconds. Returns what to say of each."""
        ...

    def end_late(self, ref: Any, why: str) -> str:
        """End the one that this call was made to. Returns what to say of it."""
        ...


def launcher(config: PpoConfig, *, engines_alone: bool = False) -> AbstractContextManager[Launcher]:
    """That of placement.processes, with room for the run or for its rollout engines alone; all that it started ends with it."""
    if config.placement.processes == "one":
        return one_process(config)
    from trainer.cluster.on_ray import on_ray  # who runs in one process does without Ray

    return on_ray(config, engines_alone)


@contextmanager
def one_process(config: PpoConfig) -> Iterator[OneProcess]:
    before = dict(os.environ)
    try:
        yield OneProcess(plan(config))
    finally:  # what ranks tell DeepSpeed there would tell the next process that this one starts that torchrun did
        os.environ.clear()
        os.environ.update(before)


class OneProcess:
    """Implements Launcher: calls run as they are made, in the thread that makes them, one at a time. Nothing here dies alone."""

    errors: ClassVar[tuple[type[Exception], ...]] = (RunError,)

    def __init__(self, plan: Placement):
        self.plan, self.turn = plan, threading.RLock()
        self.recorded: MutableMapping[str, Any] = WeakValueDictionary()
        self.spans: str | None = None

    def start(self, kind: type, *args: Any, threads: int, name: str | None = None, **_: Any) -> Any:
        actor = Actor(self.turn, threads, kind, args)
        register(self.recorded, kind, name, actor)
        return actor

    def ask(self, function: Callable[..., Any], *args: Any, **_: Any) -> Any:
        return _result(function, args)

    def watch(self, actor: Any, limit: float, silence: float | None = None) -> None:
        pass

    def doing(self) -> dict[str, str]:
        return {}

    def wait(self, refs: Any, seconds: float, what: str) -> Any:
        return [self.get(ref) for ref in refs] if isinstance(refs, list) else self.get(refs)

    def get(self, ref: Any) -> Any:
        return ref.result()

    def done(self, refs: list[Any], seconds: float = 0.0, count: int | None = None) -> tuple[list[Any], list[Any]]:
        return list(refs), []

    def died(self, ref: Any) -> bool:
        return False

    def is_death(self, error: Exception) -> bool:
        return False

    def end(self, actor: Any) -> None:
        pass

    def end_silent(self, refs: list[Any], watch: Watch) -> list[str]:
        return []

    def end_late(self, ref: Any, why: str) -> str:
        raise AssertionError("a call in this process has ended by now")


class Actor:
    """An object, called as those of Ray are. It has torch threads and random states of its own, as a process would."""

    def __init__(self, turn: threading.RLock, threads: int, kind: type, args: tuple[Any, ...]):
        self._turn, self._threads, self._random = turn, threads, _random_state()
        with self._alone():
            self._object = kind(*args)

    def __getattr__(self, method: str) -> _Method:
        return _Method(self, method)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with self._turn:
            outside, threads = _random_state(), torch.get_num_threads()
            _set_random_state(self._random)
            torch.set_num_threads(self._threads)
            try:
                yield
            finally:
                self._random, self._threads = _random_state(), torch.get_num_threads()
                _set_random_state(outside)
                torch.set_num_threads(threads)


class _Method:
    def __init__(self, actor: Actor, name: str):
        self.actor, self.name = actor, name

    def remote(self, *args: Any, **kwargs: Any) -> Future[Any]:
        with self.actor._alone():
            return _result(getattr(self.actor._object, self.name), args, kwargs)


def _result(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Future[Any]:
    """Of a call that is made here and now; what it raises comes with the result."""
    future: Future[Any] = Future()
    try:
        future.set_result(function(*args, **(kwargs or {})))
    except Exception as error:
        future.set_exception(error)
    return future


def _random_state() -> tuple[Any, ...]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


def _set_random_state(state: tuple[Any, ...]) -> None:
    of_python, of_numpy, of_torch, of_cuda = state
    random.setstate(of_python)
    np.random.set_state(of_numpy)
    torch.set_rng_state(of_torch)
    if of_cuda is not None:
        torch.cuda.set_rng_state(of_cuda)
