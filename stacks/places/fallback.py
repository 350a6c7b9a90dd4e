"""flotilla:backends of a stack on a cloud of its own: where else dstack may launch its nodes, when that cloud has none or is dearer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from pydantic_core import PydanticCustomError

from stacks.places import dstack
from stacks.places.machine_types import Machine
from stacks.schema import Fleet, Stack
from stacks.settings.fields import known, setting_error

SETTINGS = ("backends", "backend_order", "fleets.max_price")  # of a cloud, beside those that all clouds have
CHECKPOINTS = ("instance", "bucket")


def of_backends(stack: Stack, machine: Callable[[Fleet], Machine]) -> Iterator[PydanticCustomError]:
    """`machine`: a fleet's type. Nothing where the stack names no backends."""
    if not stack.backends:
        yield from known(dstack.order(stack))
        return
    for rule in (_own, dstack.twice, _server, _checkpoints, dstack.folder, dstack.mounts):
        yield from known(rule(stack))
    for index, fleet in enumerate(stack.fleets):
        yield from known(_fleet(stack, fleet, ("fleets", index)))
        yield from known(_fabric(stack, fleet, machine(fleet), ("fleets", index)))


def _own(stack: Stack) -> Iterator[PydanticCustomError]:
    for index, entry in enumerate(stack.backends):
        if entry.type == stack.cloud:
            text = f"{entry.type!r} is the stack's own cloud, which is tried anyway; list the others"
            yield setting_error(text, "backends", index, "type")


def _server(stack: Stack) -> Iterator[PydanticCustomError]:
    if stack.control_node:
        text = "cloud, but a control node has no keys of the other clouds that flotilla:backends lists; take elsewhere"
        yield setting_error(text, "dstack", "host")


def _checkpoints(stack: Stack) -> Iterator[PydanticCustomError]:
    kind = stack.checkpoints.kind
    if kind not in CHECKPOINTS:
        text = f"{kind} is in {stack.cloud} alone, and nodes may be on {', '.join(entry.type for entry in stack.backends)}; take bucket"
        yield setting_error(text, "checkpoints", "kind")


def _fleet(stack: Stack, fleet: Fleet, at: tuple[str | int, ...]) -> Iterator[PydanticCustomError]:
    """Whose machines dstack launches when a run needs them, and in no network of the stack's own."""
    listed = ", ".join(entry.type for entry in stack.backends)
    if fleet.provision == "pulumi":
        text = f"pulumi, but its machines are in {stack.cloud} alone; take dstack, or leave flotilla:backends out"
        yield setting_error(text, *at, "provision")
    if fleet.capacity.kind not in dstack.CAPACITY:
        text = f"{fleet.capacity.kind} is held in {stack.cloud}, and nodes may be on {listed}; take {' or '.join(dstack.CAPACITY)}"
        yield setting_error(text, *at, "capacity", "kind")
    if fleet.elastic:
        text = f"rollout, but its nodes have to reach the head's, and these may be apart ({stack.cloud}, {listed}); leave backends out"
        yield setting_error(text, *at, "role")


def _fabric(stack: Stack, fleet: Fleet, kind: Machine, at: tuple[str | int, ...]) -> Iterator[PydanticCustomError]:
    """Nodes of one cluster are all in one cloud, and how NCCL finds the fabric is settled before it is known in which."""
    nodes = sum(int(each.nodes) for each in stack.fleets)
    if nodes > 1 and kind.fabric != "none":
        text = f"{kind.name} joins nodes by {kind.fabric}, which only {stack.cloud} has; a stack with flotilla:backends has one node"
        yield setting_error(f"{text} of it, or several of a type without such a fabric", *at, "machine")
    elif fleet.nodes > 1 and not dstack.clustering(stack):
        listed = ", ".join(entry.type for entry in stack.backends)
        text = f"{fleet.nodes}, but dstack joins no nodes of {listed} to a cluster, so none of them would ever be taken"
        yield setting_error(text, *at, "nodes")


def variables(*keys: str) -> Callable[[Stack], Mapping[str, str]]:
    """Nodes elsewhere have no role of the cloud's, so that all mount the bucket by keys."""

    def of(stack: Stack) -> Mapping[str, str]:
        wanted = stack.backends and stack.checkpoints.kind == "bucket"
        return dict.fromkeys(keys, "nodes mount the checkpoints' bucket by it, wherever they are") if wanted else {}

    return of
