"""`flotilla plan`: what a run needs and costs, on a stack's machines or on any."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

from cli.project import CommandError, console
from cluster_tasks.price import hourly
from stacks.load import load, stack_file
from stacks.places import PLACES, gpus, machines
from stacks.schema import Fleet, Stack

USAGE = "usage: flotilla plan RUN.yaml [STACK] [flags] [key=value ...]"
MODULE = "trainer.plan"


def words(arguments: list[str], root: Path) -> list[str]:
    """The arguments of `python -m trainer.plan`; a stack's name becomes its flags. Raises UserError."""
    if not arguments:
        print(USAGE, file=sys.stderr)
        return []
    if {"-h", "--help"} & set(arguments):
        return ["--help"]
    run, *rest = arguments
    if not rest or rest[0].startswith("-") or "=" in rest[0]:
        return [run, *rest]
    return [run, *of_stack(load(rest[0], root), root), *rest[1:]]


def of_stack(stack: Stack, root: Path) -> list[str]:
    """GPUs, nodes, network and price. Raises CommandError for a stack without GPUs, or with several kinds."""
    fleets = stack.cluster_fleets()
    kinds = machines(stack) if PLACES[stack.cloud].cloud else {}
    own = gpus(kinds) if kinds else {fleet.name: fleet.gpu for fleet in fleets if fleet.gpu}
    having = [(fleet, own[fleet.name]) for fleet in fleets if fleet.name in own and own[fleet.name].count]
    file = stack_file(stack.name, root).relative_to(root)
    if not having:
        raise CommandError(f"{file}: flotilla:fleets: no node of the cluster has a GPU; without a stack all kinds are tried")
    fleet, gpu = having[0]
    if any((other.name, other.count, other.memory) != (gpu.name, gpu.count, gpu.memory) for _, other in having):
        raise CommandError(f"{file}: flotilla:fleets: the cluster has several kinds of nodes with GPUs, a plan is of one; name it by --gpu")
    if gpu.name is None:
        raise CommandError(f"{file}: flotilla:fleets: gpu.name is missing, so nobody knows what a GPU can do; or --gpu without a stack")
    found = ["--gpu", gpu.name, "--gpus-per-node", str(gpu.count), "--nodes", str(sum(each.nodes for each, _ in having))]
    if gpu.memory:
        found += ["--gpu-memory", f"{_gigabytes(str(gpu.memory)):g}"]
    if network := _network(fleet, kinds):
        found += ["--network", f"{network:g}"]
    price = hourly(stack) or _listed(stack)
    return [*found, "--price", f"{price:g}"] if price else found


def _network(fleet: Fleet, kinds: dict) -> float:
    """Gbit/s of a node; 0 where the stack does not say it."""
    return kinds[fleet.name].bandwidth if fleet.name in kinds else 0


def _gigabytes(size: str) -> float:
    number = float("".join(letter for letter in size if letter.isdigit() or letter == "."))
    return number * (1000 if "TB" in size.upper() else 1)


def _listed(stack: Stack) -> float | None:
    """List price of a cloud's machines, where infra/prices.py knows it."""
    if not PLACES[stack.cloud].cloud:
        return None
    prices = import_module("infra.prices")
    try:
        return prices.cost(stack).hourly
    except prices.PricesUnknown as reason:
        console.print(f"price not known: {reason}", markup=False)
        return None
