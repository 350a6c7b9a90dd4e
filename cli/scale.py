"""`flotilla scale`: how many nodes of an elastic fleet run. They join and leave the running cluster."""

from __future__ import annotations

import argparse
import json
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from cli.clusters import place
from cli.project import CommandError, output
from stacks.change import parse_change
from stacks.load import load
from stacks.schema import Fleet, Stack

PRICES_SECONDS = 60  # in which a catalogue may be downloaded


def main(verb: str, arguments: list[str], root: Path) -> int:
    parser = argparse.ArgumentParser(
        prog=f"flotilla {verb}", description="Starts or stops nodes of fleets with role: rollout, while the cluster runs."
    )
    parser.add_argument("stack", help="whose cluster is up")
    parser.add_argument("changes", nargs="+", metavar="FLEET=N", help="how many nodes of the fleet are to run, such as rollout=6")
    options: Any = parser.parse_args(arguments)
    changes = dict(map(parse_change, options.changes))
    stack = load(options.stack, root)
    wanted = {name: checked(stack, name, count) for name, count in changes.items()}
    for name, fleet in wanted.items():
        if fleet.hourly_budget is not None:
            affordable(stack, fleet, changes[name], *price(stack, fleet, root))
    return place(stack).scale(stack, root, [(fleet, changes[name]) for name, fleet in wanted.items()])


def checked(stack: Stack, name: str, count: int) -> Fleet:
    """The elastic fleet of that name, which may have so many nodes. Raises CommandError."""
    where, elastic = f"stacks/Pulumi.{stack.name}.yaml", {fleet.name: fleet for fleet in stack.elastic_fleets()}
    if name not in elastic and name in [fleet.name for fleet in stack.fleets]:
        raise CommandError(
            f"{name}={count}: {name} has role: cluster, whose nodes start and end together; in {where} it needs role: rollout"
        )
    if name not in elastic:
        near = get_close_matches(name, elastic, n=1)
        guess = f"; did you mean {near[0]}?" if near else ""
        raise CommandError(f"{name}={count}: {where} has no elastic fleet {name}{guess} (role: rollout: {', '.join(elastic) or 'none'})")
    fleet = elastic[name]
    if not fleet.least <= count <= fleet.nodes:
        raise CommandError(
            f"{name}={count}: {where} gives fleet {name} {fleet.least} to {int(fleet.nodes)} nodes (flotilla:fleets[].nodes)"
        )
    return fleet


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
