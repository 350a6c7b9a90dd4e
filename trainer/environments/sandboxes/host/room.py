"""How many sandboxes a node may have: who gets one now, who waits, and which are kept warm for whoever comes next."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
USUAL: dict[str, Any] = {  # what a run asks for that sets nothing
    "image": "",
    "workdir": "/workspace",
    "cpu": 1.0,
    "memory_mb": 512,
    "processes": 64,
    "disk_mb": 256,
    "files": 256,
    "folders": {},
    "env": {"PATH": PATH, "HOME": "/root", "USER": "root", "LANG": "C.UTF-8", "TERM": "dumb"},
    "ports": [],
}
REMEMBERED = 32  # requests, of which the most frequent kind is kept warm


def read(spec: Mapping[str, Any]) -> dict[str, Any]:
    """What a client asks for. Raises ValueError for what owner.py cannot read."""
    if spec.keys() != USUAL.keys():
        raise ValueError(f"settings {sorted(spec.keys() ^ USUAL.keys())}: the pool runs another version of Flotilla than the job")
    for name, usual in USUAL.items():
        kinds = (int, float) if isinstance(usual, float) else (type(usual),)
        if not isinstance(spec[name], kinds) or isinstance(spec[name], bool) or (kinds[0] is int and spec[name] <= 0):
            raise ValueError(f"{name}={spec[name]!r} is not like {usual!r}")
    return dict(spec)


def kind(spec: Mapping[str, Any]) -> str:
    """The same for sandboxes that may stand for one another."""
    return json.dumps(spec, sort_keys=True)


@dataclass
class Room:
    number: int  # sandboxes at a time
    memory_mb: int = 0  # of all together; 0: whatever they take
    warm: int = 0  # that are to be ready
    taken: dict[str, int] = field(default_factory=dict)  # memory by name, of what episodes have
    line: deque[tuple[str, int, asyncio.Future[None]]] = field(default_factory=deque)
    asked: deque[str] = field(default_factory=lambda: deque([kind(USUAL)], maxlen=REMEMBERED))

    def never(self, spec: Mapping[str, Any]) -> str:
        """Why it has no room here even when nothing else is there."""
        need = memory(spec)
        if self.memory_mb and need > self.memory_mb:
            return f"memory_mb + disk_mb = {need}, and all sandboxes of this node have {self.memory_mb} (fleets[].sandboxes.memory_mb)"
        return ""

    async def enter(self, name: str, spec: Mapping[str, Any], seconds: float) -> bool:
        """Takes a place; False where there was none within `seconds`. Who came first goes first."""
        self.asked.append(kind(spec))
        if not self.line and self._fits(memory(spec)):
            self.taken[name] = memory(spec)
            return True
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.line.append((name, memory(spec), place))
        try:
            await asyncio.wait({place}, timeout=seconds)
            return place.done()
        except asyncio.CancelledError:
            if place.done():
                self.leave(name)
            raise
        finally:
            place.cancel()
            self.line = deque(each for each in self.line if each[2] is not place)
            self._call()  # who stands behind may fit

    def leave(self, name: str) -> None:
        self.taken.pop(name, None)
        self._call()

    def to_keep(self) -> int:
        """How many of the kind that is asked for most may be kept warm now."""
        fit = (self.memory_mb - sum(self.taken.values())) // memory(json.loads(self.most_asked())) if self.memory_mb else self.warm
        return max(0, min(self.warm, self.number - len(self.taken), fit))

    def most_asked(self) -> str:
        return Counter(self.asked).most_common(1)[0][0]

    def _fits(self, need: int) -> bool:
        return len(self.taken) < self.number and (not self.memory_mb or sum(self.taken.values()) + need <= self.memory_mb)

    def _call(self) -> None:
        while self.line and self._fits(self.line[0][1]):
            name, need, place = self.line.popleft()
            if not place.done():
                self.taken[name] = need
                place.set_result(None)


def memory(spec: Mapping[str, Any]) -> int:
    return spec["memory_mb"] + spec["disk_mb"]
