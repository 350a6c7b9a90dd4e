"""The head's watch over a complete cluster: its nodes, its Ray, its job."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice

from .errors import NODE_LOST, RAY_FAILED, Failure, Reclaimed
from .health import Health
from .job import Job
from .ports import silent
from .preemption import Preemption
from .ray import Ray
from .services import Services
from .settings import Settings
from .waiting import pause

BLAME_SECONDS = 5  # after a job failed, within which a node's loss is known that may be the cause
# What the head does per second is much the same for 16 nodes and for hundreds: of 256 a host that is cut off is known after 8 s, not one.
LISTED = 64  # nodes per second of Ray's list, which is read as a whole
SELDOM = 20  # seconds between two readings at most, however many nodes: within 30 a loss is named
PROBED = 32  # hosts per second that are asked whether they are there

log = logging.getLogger(__name__)


def watch_cluster(settings: Settings, ray: Ray, job: Job | None, services: Services) -> int:
    """Until the job ends (returns its code), or a node is lost for too long or Ray ends (raises Failure)."""
    liveness, health, preemption = Liveness.of(settings), Health.of(settings), Preemption.of(settings)
    code, ended, answered, listed = None, 0.0, time.monotonic(), 0.0
    while True:
        pause(1)
        health.report()
        services.poll()
        now = time.monotonic()
        if end := ray.ended():
            raise Failure(RAY_FAILED, end)
        if job and code is None and (code := job.exit_code(settings.dashboard)) is not None:
            ended = now
        # A job may fail before it is known that it lost a node.
        if code is not None and (code == 0 or len(settings.addresses) == 1 or now - ended > BLAME_SECONDS):
            return code
        if address := preemption.poll():
            raise Reclaimed(NODE_LOST, f"the cloud takes the machine of {address} back; jobs were asked to save")
        if code is not None or now - listed >= liveness.period:
            listed = now
            alive = settings.dashboard.alive_nodes()
            if alive is not None:
                answered = now
                liveness.update(alive)
            elif now - answered > settings.join_timeout:
                late = f"the dashboard has not answered for {settings.join_timeout} s (--join-timeout); {settings.ray_logs}"
                raise Failure(RAY_FAILED, late)
        if code is not None and liveness.lost:
            raise Failure(NODE_LOST, f"the job failed with {code} when {' and '.join(liveness.lost)} was lost")


@dataclass
class Liveness:
    """Which nodes are there: those that Ray calls ALIVE and whose hosts answer. Ray alone takes 50 s to miss a host that is cut off."""

    settings: Settings
    probed: deque[str]  # of the hosts, in turns; what drops packets to this port from the start is left to Ray
    silent: set[str] = field(default_factory=set)  # of those, at their last turn
    lost: dict[str, float] = field(default_factory=dict)  # address: since when

    @classmethod
    def of(cls, settings: Settings) -> Liveness:
        others = settings.addresses[1:]
        return cls(settings, deque(sorted({*others} - silent(others, settings.port))))

    @property
    def period(self) -> int:
        """Seconds between two looks at the nodes."""
        return min(max(1, len(self.settings.addresses) // LISTED), SELDOM)

    def update(self, alive: Mapping[str, Mapping[str, float]]) -> None:
        """Reports who is gone and who is back. Raises Failure when one is gone for too long."""
        policy, limit = f"--on-node-loss {self.settings.on_node_loss}", self.settings.patience
        turn = {*islice(self.probed, PROBED * self.period)}
        self.probed.rotate(-len(turn))
        self.silent = (self.silent - turn) | silent(turn, self.settings.port)
        here, now = alive.keys() - self.silent, time.monotonic()
        for rank, address in enumerate(self.settings.addresses):
            node = f"node {rank} ({address})"
            if address not in here and address not in self.lost:
                self.lost[address] = now
                how = "its host does not answer" if address in alive else "Ray has ended there"
                log.error("lost %s, %s; it has %d s to return (%s)", node, how, limit, policy)
            elif address in here and address in self.lost:
                log.info("%s is back after %.0f s", node, now - self.lost.pop(address))
            elif address in self.lost and now - self.lost[address] > limit:
                raise Failure(NODE_LOST, f"{node} is lost: not back within {limit} s ({policy})")
