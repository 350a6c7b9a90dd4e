"""Whose turn it is on devices that training ranks and rollout engines share. Knows neither Ray nor GPUs.

One step: the engines sample, sleep, the ranks load their states and learn; then the engines' weights wake and are received, the ranks
move their states to CPU memory, and the engines' KV cache wakes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

Memory = Literal["weights", "kv_cache"]  # as vLLM names the parts that wake


class Engines(Protocol):
    """Both calls return once all have done it, after all that they were asked before, and do nothing where it is done already."""

    def sleep(self) -> None: ...

    def wake(self, memory: Memory) -> None: ...


class Ranks(Protocol):
    """Of all roles that share the devices. Both calls return once all have done it, and do nothing where it is done already."""

    def offload(self) -> None: ...

    def reload(self) -> None: ...


class Turns:
    """If switching fails, neither side holds the devices; the next switch to the ranks starts with `sleep` and recovers."""

    def __init__(self, engines: Engines, ranks: Ranks, *, shared: bool):
        """`shared` is False where both have devices of their own: nobody waits for a turn then."""
        self.engines, self.ranks, self.shared = engines, ranks, shared
        self.whose: Literal["ranks", "engines"] | None = None

    def to_ranks(self) -> None:
        """The engines end what they were asked and sleep; the ranks may learn, score, save and send."""
        if not self.shared or self.whose == "ranks":
            return
        self.whose = None
        self.engines.sleep()
        self.ranks.reload()
        self.whose = "ranks"

    def to_engines(self, send: Callable[[], None]) -> None:
        """`send` gives the engines the newest weights; then they may sample."""
        if not self.shared:
            send()
            return
        self.to_ranks()
        self.whose = None
        self.engines.wake("weights")
        send()
        self.ranks.offload()
        self.engines.wake("kv_cache")
        self.whose = "engines"

    def start_engines(self, start: Callable[[], None]) -> None:
        """`start` brings up engines, which needs the devices' memory; the ranks' turn comes next."""
        if not self.shared:
            start()
            return
        self.whose = None
        self.ranks.offload()
        start()
        self.to_ranks()
