"""What nodes of an elastic fleet cost, against `fleets[].hourly_budget`; asked before any is started."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module

from cli.project import CommandError
from stacks.places import place_of
from stacks.schema import Fleet, Stack


def require(stack: Stack, counts: Iterable[tuple[Fleet, int]]) -> None:
    """Raises CommandError where so many nodes of a fleet cost more than its budget, or nobody knows what they cost."""
    for fleet, count in counts:
        if fleet.hourly_budget is not None and count:
            affordable(stack, fleet, count, *price(stack, fleet))


def affordable(stack: Stack, fleet: Fleet, count: int, each: float, source: str) -> None:
    """Raises CommandError where so many nodes cost more than the fleet's budget."""
    if count > (most := fleet.pays_for(each)):
        costs = f"{count} nodes cost {count * each:,.2f} USD an hour, {each:,.2f} each by {source}"
        gives = f"stacks/Pulumi.{stack.name}.yaml gives fleet {fleet.name} {fleet.hourly_budget:,.2f} (flotilla:fleets[].hourly_budget)"
        raise CommandError(f"{fleet.name}={count}: {costs}, but {gives}, which pays for {most}")


def price(stack: Stack, fleet: Fleet) -> tuple[float, str]:
    """USD an hour of one node, and who says so. Raises CommandError where nobody knows it."""
    if stack.monitoring.price is not None:
        return stack.monitoring.price, "flotilla:monitoring.price"
    if not place_of(stack).cloud:
        raise CommandError(f"flotilla:cloud: {stack.cloud} has no list of prices; flotilla:monitoring.price says what a node costs")
    prices = import_module("infra.prices")
    try:
        listed = prices.cost(stack)
    except prices.PricesUnknown as error:
        raise CommandError(str(error)) from None
    [found] = [each for each in listed.fleets if each.fleet == fleet.name]
    if found.each is None:
        why = f"flotilla:fleets[].hourly_budget: what {found.machine} costs is not known, {found.why}"
        raise CommandError(f"{why}; say it in flotilla:monitoring.price")
    return found.each, listed.dated.partition(";")[0] or "today's list price"
