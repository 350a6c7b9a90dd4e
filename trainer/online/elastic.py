"""rollout.elastic: rollout engines on Ray nodes that come and go while the run trains.

A node that has the label flotilla.role=rollout gets as many engines as it holds. They are outside the placement group and the sync group:
they take weights as they are published (trainer/weights/published.py), and the run neither waits for them nor ends with them. Engines of
a node that is drained are ended, those of a dead one forgotten; what they were asked is asked of others (trainer/rollout/calls.py).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

import ray
from ray.exceptions import RayError

from trainer.cluster import heartbeat, placement
from trainer.cluster.placement import Bundle
from trainer.configs.ppo import PpoConfig
from trainer.errors import ConfigError
from trainer.metrics.progress import among_logs, write
from trainer.online.processes import WorkerGroups
from trainer.rollout.calls import Calls
from trainer.runs import faults

WRITE = 5.0  # seconds between two states written
FAILURES = 3  # of engines on a node, after which it gets no more
FILE = "engines.json"
NUMBERS = count()  # of this process: a name is never used again


@dataclass
class Guest:
    """A rollout engine that comes and goes."""

    node: str
    actor: Any
    start: Any  # the reference of its start
    since: float  # time.monotonic() at its start
    ready: bool = False


class Elastic:
    """For one thread, which calls `look`."""

    def __init__(self, config: PpoConfig, workers: WorkerGroups, calls: Calls):
        self.config, self.workers, self.calls = config, workers, calls
        self.share: Bundle = placement.engine_share(config)
        self.most = config.rollout.max_engines
        self.guests: dict[str, Guest] = {}  # by name
        self.failures: Counter[str] = Counter()  # by node
        self.nodes: dict[str, Any] = {}  # alive, by id
        self.tokens: dict[str, int] = {}  # as last written
        self.written = time.monotonic()
        self.watch = heartbeat.Watch(deadlocks=False)
        self.files = [file for file in (workers.folder / FILE, among_logs("engines")) if file]

    def look(self) -> None:
        """Start engines on nodes that came, forget those of nodes that went, and hand those that are ready to `Calls`."""
        try:
            self.nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
            draining = ray._private.state.state.get_draining_nodes()  # type: ignore[attr-defined]
            free = ray._private.state.available_resources_per_node()  # type: ignore[attr-defined]
        except (RayError, RuntimeError) as error:  # the next look may get through
            print(f"warning: rollout.elastic: Ray does not say which nodes there are: {error}", flush=True)
            return
        silent = self.watch.look(_id(guest) for guest in self.guests.values() if guest.ready)
        for name, guest in [*self.guests.items()]:
            if guest.node not in self.nodes:
                self._leave(name, "its node is gone")
            elif guest.node in draining:
                self._leave(name, "its node is about to go")
            elif name in self.calls.failed:
                self._fail(name, self.calls.failed[name])
            elif why := silent.get(_id(guest)):
                self._fail(name, f"it {why}")
            elif not guest.ready:
                self._join(name, guest)
        for node, state in self.nodes.items():
            if state["Labels"].get(placement.ROLE) == placement.ELASTIC and node not in draining and self.failures[node] < FAILURES:
                self._start(node, free.get(node, {}))
        self.calls.guests = {name: guest.actor for name, guest in self.guests.items() if guest.ready}
        if time.monotonic() - self.written >= WRITE:
            self._write()

    def close(self) -> None:
        self.calls.guests = {}
        for guest in self.guests.values():
            ray.kill(guest.actor)
        self.guests.clear()
        for file in self.files:
            file.unlink(missing_ok=True)

    def _start(self, node: str, free: Mapping[str, float]) -> None:
        if any(guest.node == node and not guest.ready for guest in self.guests.values()):
            return  # what these take may still be free
        for _ in range(fitting(self.share, free)):
            if self.most and self.config.rollout.engines + len(self.guests) >= self.most:
                return
            number = next(NUMBERS)
            name, seed = f"elastic-{number}", self.config.run.seed + self.config.rollout.engines + number
            self.guests[name] = Guest(node, *self.workers.engines.alone(name, node, seed, self.workers.plan), time.monotonic())

    def _join(self, name: str, guest: Guest) -> None:
        if not ray.wait([guest.start], timeout=0, fetch_local=False)[0]:
            if time.monotonic() - guest.since > (limit := self.config.trainer.timeout):
                self._fail(name, f"it did not start within {limit} s (trainer.timeout)")
            return
        try:
            ray.get(guest.start)
        except (RayError, ConfigError) as error:
            self._fail(name, str(error).strip().splitlines()[-1])
            return
        guest.ready = True
        print(f"{name} joins, on node {self._address(guest.node)}", flush=True)

    def _fail(self, name: str, why: str) -> None:
        node = self.guests[name].node
        self.failures[node] += 1
        last = f"; node {self._address(node)} gets no more, {FAILURES} failed on it" if self.failures[node] == FAILURES else ""
        self._leave(name, f"{why}{last}")

    def _leave(self, name: str, why: str) -> None:
        guest = self.guests.pop(name)
        self.calls.guests = {other: actor for other, actor in self.calls.guests.items() if other != name}
        with suppress(RayError):
            ray.kill(guest.actor)
        print(f"{name} leaves: {why}", flush=True)
        faults.note(self.workers.folder, self.workers.learned + 1, f"{name} left: {why}")

    def _address(self, node: str) -> str:
        return self.nodes[node]["NodeManagerAddress"] if node in self.nodes else node

    def _write(self) -> None:
        """Who serves, for `flotilla status` and people."""
        now = time.monotonic()
        rows = []
        for name, seat in [*self.calls.seats.items()]:
            guest = self.guests.get(name)
            node = self.nodes.get(guest.node) if guest else None
            rows.append(
                {
                    "name": name,
                    "node": node["NodeManagerAddress"] if node else None,
                    "fleet": node["Labels"].get("flotilla.fleet") if node else None,
                    "version": seat.version if seat.alone else self.workers.learned,
                    "tokens_per_second": round((seat.tokens - self.tokens.get(name, 0)) / (now - self.written), 1),
                    "in_flight": len(seat.asked),
                }
            )
        self.tokens, self.written = {name: seat.tokens for name, seat in [*self.calls.seats.items()]}, now
        for file in self.files:
            write(file, {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "run": self.workers.folder.name, "engines": rows})


def _id(guest: Guest) -> str:
    return guest.actor._actor_id.hex()


def fitting(share: Bundle, free: Mapping[str, float]) -> int:
    """How many engines find room."""
    return min((int((free.get(name, 0) + 1e-6) / amount) for name, amount in share.items()), default=0)
