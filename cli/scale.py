"""`flotilla scale`: how many nodes of an elastic fleet run. They join and leave the running cluster."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Any

from cli import budget
from cli.places import place
from cli.project import CommandError
from stacks.host import command_line
from stacks.host.change import parse_change
from stacks.load import load
from stacks.schema import Fleet, Stack


def main(verb: str, arguments: list[str], root: Path) -> int:
    about = "Start or stop nodes of elastic fleets (role: rollout) while the cluster runs."
    parser = command_line.parser(f"flotilla {verb}", about, ("flotilla scale onprem rollout=6", "flotilla scale onprem rollout=0"))
    command_line.add_stack(parser)
    parser.add_argument("changes", nargs="+", metavar="FLEET=N", help="number of nodes that the fleet should have")
    options: Any = parser.parse_args(arguments)
    changes = dict(map(parse_change, options.changes))
    stack = load(options.stack, root)
    wanted = {name: checked(stack, name, count) for name, count in changes.items()}
    counts = [(fleet, changes[name]) for name, fleet in wanted.items()]
    budget.require(stack, counts)
    return place(stack).scale(stack, root, counts)


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
