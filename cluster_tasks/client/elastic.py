"""Elastic nodes, and the rollout engines of runs that train now with rollout.elastic, as `flotilla status` shows them.

The trainer's driver writes who serves among Ray's logs on its node (trainer/online/elastic.py), which the cluster's dashboard shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from cluster_tasks.client.jobs import submitted
from cluster_tasks.node.dashboard import Dashboard, written
from stacks.schema import Stack


@dataclass(frozen=True)
class ElasticNode:
    """A node of a fleet with role: rollout."""

    fleet: str
    name: str  # its address, its dstack run, or its Slurm job
    state: str
    price: float | None  # USD an hour; None where nobody knows it

    def line(self) -> str:
        return f"elastic {self.fleet}  {self.name}  {self.state}{_usd(self.price)}"


@dataclass(frozen=True)
class Engine:
    run: str
    name: str
    node: str | None  # address of the elastic node; None on a node of the cluster
    fleet: str | None
    version: int  # step whose weights it has
    tokens_per_second: float
    in_flight: int  # requests
    price: float | None  # USD an hour: its elastic node's, shared among the engines there

    def line(self) -> str:
        where = f"on {self.node}" if self.node else "of the cluster"
        figures = f"weights {self.version}  {self.tokens_per_second:,.0f} tokens/s  {self.in_flight} in flight"
        return f"engine {self.name}  {where}  run {self.run}  {figures}{_usd(self.price)}"


@dataclass(frozen=True)
class Elastic:
    """What comes and goes."""

    nodes: list[ElasticNode]
    engines: list[Engine]
    short: list[str] = field(default_factory=list)  # what fleets with fewer nodes than they are to have miss, in words

    @classmethod
    def of(cls, stack: Stack, nodes: list[ElasticNode], dashboard: Dashboard | None) -> Elastic:
        """These nodes, and the engines of all jobs that run; none of them where the dashboard does not answer."""
        there = Counter(node.fleet for node in nodes)
        lacking = [fleet for fleet in stack.elastic_fleets() if there[fleet.name] < fleet.least]
        short = [f"fleet {fleet.name} has {there[fleet.name]} of at least {fleet.least} nodes" for fleet in lacking]
        return cls(nodes, list(_engines(dashboard, nodes)) if dashboard else [], short)

    def lines(self) -> list[str]:
        return [*(shown.line() for shown in (*self.nodes, *self.engines)), *(f"not healthy: {line}" for line in self.short)]

    def as_json(self) -> dict[str, Any]:
        return {"elastic": list(map(asdict, self.nodes)), "engines": list(map(asdict, self.engines))}


NO_ELASTIC = Elastic([], [])


def joined(dashboard: Dashboard, stack: Stack) -> list[ElasticNode]:
    """The nodes that Ray has; none where the dashboard does not answer."""
    return [ElasticNode(fleet, address, "ALIVE", stack.monitoring.price) for address, fleet in dashboard.elastic_nodes().items()]


def _engines(dashboard: Dashboard, nodes: Iterable[ElasticNode]) -> Iterator[Engine]:
    """All nodes of a fleet cost the same."""
    prices = {node.fleet: node.price for node in nodes}
    with suppress(OSError):  # the forward broke while we looked
        for job in [job for job in submitted(dashboard) if job["status"] == "RUNNING"]:
            if found := written(dashboard, job, "engines"):  # most jobs write none
                yield from _priced(found, prices)


def _priced(found: dict[str, Any], prices: Mapping[str, float | None]) -> Iterator[Engine]:
    rows = found["engines"]
    together = Counter(row["node"] for row in rows)
    for row in rows:
        price = prices.get(row["fleet"]) if row["fleet"] else None
        yield Engine(run=found["run"], price=price and round(price / together[row["node"]], 6), **row)


def _usd(price: float | None) -> str:
    return f"  {price:,.2f} USD/h" if price else ""
