"""What nodes of an elastic fleet cost, against `fleets[].hourly_budget`; asked before any is started."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

from cli.project import CommandError, output
from stacks.schema import Fleet, Stack

PRICES_SECONDS = 60  # in which a catalogue may be downloaded


def require(stack: Stack, root: Path, counts: Iterable[tuple[Fleet, int]]) -> None:
    """Raises CommandError where so many nodes of a fleet cost more than its budget, or nobody knows what they cost."""
    for fleet, count in counts:
        if fleet.hourly_budget is not None and count:
            affordable(stack, fleet, count, *price(stack, fleet, root))


def affordable(stack: Stack, fleet: Fleet, count: int, each: float, source: str) -> None:
    """Raises CommandError where so many nodes cost more than the fleet's budget."""
    if count > (most := fleet.pays_for(each)):
        costs = f"{count} nodes cost {count * each:,.2f} USD an hour, {each:,.2f} each by {source}"
        gives = f"stacks/Pulumi.{stack.name}.yaml gives fleet {fleet.name} {fleet.hourly_budget:,.2f} (flotilla:fleets[].hourly_budget)"
        raise CommandError(f"{fleet.name}={count}: {costs}, but {gives}, which pays for {most}")


def price(stack: Stack, fleet: Fleet, root: Path) -> tuple[float, str]:
    """USD an hour of one node, and who says so. Raises CommandError where nobody knows it."""
    if stack.monitoring.price is not None:
        return stack.monitoring.price, "flotilla:monitoring.price"
    listed = json.loads(output([sys.executable, "-m", "infra.prices", stack.name, "--json"], root, seconds=PRICES_SECONDS))
    [found] = [each for each in listed["fleets"] if each["fleet"] == fleet.name]
    if found["each"] is None:
        why = f"flotilla:fleets[].hourly_budget: what {found['machine']} costs is not known, {found['why']}"
        raise CommandError(f"{why}; say it in flotilla:monitoring.price")
    return found["each"], listed["dated"].partition(";")[0] or "today's list price"
