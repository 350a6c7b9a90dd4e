"""What the nodes of a cluster cost, as the stack file says."""

from __future__ import annotations

from stacks.schema import Stack


def hourly(stack: Stack) -> float | None:
    """USD of all nodes; None where flotilla:monitoring.price does not say what one costs."""
    price = stack.monitoring.price
    return None if price is None else round(price * sum(fleet.nodes for fleet in stack.cluster_fleets()), 6)
