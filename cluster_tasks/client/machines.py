"""The machines of a stack's fleets on dstack: their state, age and price."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from cluster_tasks.client.dstack_run import DstackRun
from cluster_tasks.client.elastic import ElasticNode
from stacks.dstack_api import Fleet, Instance, InstanceStatus
from stacks.schema import Stack


@dataclass(frozen=True)
class Machine:
    """An instance of one of the stack's fleets."""

    name: str
    fleet: str
    status: str
    kind: str | None  # the machine type
    region: str | None
    price: float  # dollars an hour; 0 for your own machines, unless flotilla:monitoring.price says it
    hours: float  # since it was made
    trouble: str | None

    @property
    def cost(self) -> float:
        return self.price * self.hours


def machines(stack: Stack, fleets: list[Fleet], now: datetime) -> list[Machine]:
    """Those that have not ended."""
    made = [(fleet.name, instance) for fleet in fleets for instance in fleet.instances if instance.status != InstanceStatus.TERMINATED]
    return [as_machine(instance, name, now, stack.monitoring.price) for name, instance in made]


def as_machine(instance: Instance, fleet: str, now: datetime, price: float | None = None) -> Machine:
    """`price`: an hour, where dstack knows none."""
    trouble = "does not answer" if instance.unreachable else instance.termination_reason_message or instance.termination_reason
    if not instance.unreachable and instance.health_status.value == "failure":
        trouble = "its GPUs fail dstack's health check"
    kind = instance.instance_type.name if instance.instance_type else None
    each = instance.price or price or 0.0
    return Machine(instance.name, fleet, instance.status.value, kind, instance.region, each, hours(instance.created, now), trouble)


def elastic_nodes(stack: Stack, run: DstackRun) -> list[ElasticNode]:
    """Those that are there, or on their way. Raises ClusterError."""
    found = [(fleet.name, node.name, node.get()) for fleet in stack.elastic_fleets() for node in run.of_fleet(fleet.name, fleet.nodes)]
    living = [(fleet, name, node) for fleet, name, node in found if node and not node.status.is_finished()]
    return [ElasticNode(fleet, name, node.status.value, hourly_price(node) or stack.monitoring.price) for fleet, name, node in living]


def hourly_price(run: Any) -> float | None:
    """USD of a run's nodes as dstack knows it; None where one has no price, as your own machines have none."""
    placed = [job.job_submissions[-1].job_provisioning_data for job in run.jobs] if run else []
    prices = [data.price if data else 0.0 for data in placed]
    return sum(prices) if prices and all(prices) else None


def hours(since: datetime, now: datetime) -> float:
    return round((now - since).total_seconds() / 3600, 2)
