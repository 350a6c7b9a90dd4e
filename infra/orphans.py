"""Lists machines and volumes of a cloud that carry a stack's tag, but that neither Pulumi's state nor dstack knows. It ends none of them.

An `up` that was killed leaves them, as nobody heard the cloud's answer. While an `up` is at work, what it is making is listed too.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from infra import prices
from stacks.errors import UserError
from stacks.host import command_line
from stacks.host.project import project_root
from stacks.load import StackError, load
from stacks.places import PLACES, place_of
from stacks.places.place import Place
from stacks.schema import Stack


class OrphansError(UserError):
    """The cloud, Pulumi or dstack cannot be asked; the text says why."""


@dataclass(frozen=True)
class Rented:
    """A machine, or a volume that does not end with a machine, that carries the stack's tag.

    `keys`: ids in Pulumi's state of itself, and of what made or holds it. `addresses`: of a machine.
    """

    kind: Literal["machine", "volume"]
    id: str
    name: str
    about: str
    end: str  # the command that ends it
    keys: frozenset[str]
    machine: str = ""  # its type
    spot: bool = False
    by_dstack: bool = False
    addresses: frozenset[str] = frozenset()


@dataclass(frozen=True)
class State:
    """Of Pulumi: ids of what it has, and what it asked for without hearing the answer."""

    ids: frozenset[str]
    pending: tuple[str, ...]


@dataclass(frozen=True)
class Dstack:
    """Of dstack: addresses of its machines, names of those that have none yet, and ids of its volumes."""

    addresses: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()
    volumes: frozenset[str] = frozenset()

    def has(self, rented: Rented) -> bool:
        return bool(rented.addresses & self.addresses) or rented.name in self.names or rented.id in self.volumes


def look(stack: Stack) -> list[Rented]:
    """All that carries the stack's tag. Raises StackError where the place rents out nothing, OrphansError where it cannot be asked."""
    place = place_of(stack)
    if not _asks(place):
        clouds = ", ".join(name for name, other in PLACES.items() if _asks(other))
        text = f"flotilla:cloud: {stack.cloud} makes no machines that carry the stack's tag; flotilla orphans is for {clouds}"
        raise StackError(f"stacks/Pulumi.{stack.name}.yaml: {text}")
    return import_module(f"{place.program}.orphans").rented(stack)


def _asks(place: Place) -> bool:
    return find_spec(f"{place.program}.orphans") is not None


def pulumi_state(stack: str, root: Path) -> State:
    """Raises OrphansError."""
    if shutil.which("pulumi") is None:
        raise OrphansError("what is known to Pulumi is in its state, and there is no pulumi on PATH")
    command = ["pulumi", "stack", "export", "--stack", stack]
    done = subprocess.run(command, cwd=root, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OrphansError(f"{' '.join(command)}: {' '.join(done.stderr.split())}")
    return as_state(json.loads(done.stdout))


def as_state(exported: dict[str, Any]) -> State:
    """Pure: from what `pulumi stack export` prints."""
    deployment = exported.get("deployment") or {}
    ids = frozenset(resource["id"] for resource in deployment.get("resources") or [] if resource.get("id"))
    pending = [each["resource"]["urn"] for each in deployment.get("pending_operations") or [] if each.get("type") == "creating"]
    return State(ids, tuple(f"{kind.rpartition('$')[2]} {name}" for *_, kind, name in (urn.split("::") for urn in pending)))


def dstack_knows(stack: Stack) -> Dstack:
    """Raises UserError where dstack cannot be asked."""
    from cluster_tasks.client.dstack_server import connect  # seconds of imports, for stacks that have machines of dstack
    from stacks.host.forward import LOOK_SECONDS, forwarded

    with forwarded(stack, LOOK_SECONDS):
        client = connect(stack)
        return as_dstack(client.client.fleets.list(client.project), client.client.volumes.list(client.project))


def as_dstack(fleets: Iterable[Any], volumes: Iterable[Any]) -> Dstack:
    """Pure: what has ended is not known any more."""
    living = [each for fleet in fleets for each in fleet.instances if each.status.value != "terminated"]
    return Dstack(
        frozenset(each.hostname for each in living if each.hostname),
        frozenset(each.name for each in living if not each.hostname),
        frozenset(volume.volume_id for volume in volumes if volume.volume_id and not volume.deleted),
    )


def unknown(found: Iterable[Rented], state: State, dstack: Dstack) -> list[Rented]:
    """Pure: what neither has."""
    return [each for each in found if not each.keys & state.ids and not (each.by_dstack and dstack.has(each))]


def lines(orphans: list[Rented], hourly: dict[tuple[str, bool], prices.Listed]) -> Iterator[str]:
    """Of each what it is and costs, then the command that ends it."""
    for each in orphans:
        price = hourly.get((each.machine, each.spot))
        cost = f"   {price.line()}" if price else ""
        yield f"{each.kind}  {each.id}  {each.name}  {each.about}{cost}"
        yield f"         {each.end}"


ABOUT = """\
List cloud machines and volumes that carry the stack's tag but are unknown to
Pulumi and dstack, such as those of an `up` that was killed. Deletes nothing;
while an `up` is running, its new resources are listed too.
Exit code 0: none. 1: some, each with the command that deletes it. 2: an error."""


def main(arguments: list[str] | None = None, prog: str = "python -m infra.orphans") -> int:
    parser = command_line.parser(prog, ABOUT, ("flotilla orphans aws-dev", "flotilla orphans aws-dev --json"))
    command_line.add_stack(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON list")
    options = parser.parse_args(arguments)
    root = project_root()
    try:
        stack = load(options.stack, root)
        found = look(stack)
        state = pulumi_state(stack.name, root)
        rest = unknown(found, state, Dstack())
        orphans = unknown(rest, state, dstack_knows(stack)) if any(each.by_dstack for each in rest) else rest
        hourly = prices.listed(stack, {(each.machine, each.spot) for each in orphans if each.machine})
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        keys = ("kind", "id", "name", "about", "end")
        costs = [hourly.get((each.machine, each.spot)) for each in orphans]
        rows = [{key: getattr(each, key) for key in keys} for each in orphans]
        print(json.dumps([row | {"hourly": cost and cost.usd} for row, cost in zip(rows, costs, strict=True)], indent=2))
        return 1 if orphans else 0
    for name in state.pending:
        print(f"Pulumi asked for {name} and heard no answer")
    for line in lines(orphans, hourly):
        print(line)
    print(f"{stack.name}: {len(orphans)} of {len(found)} machines and volumes with the tag stack={stack.name} are known to nobody")
    return 1 if orphans else 0


if __name__ == "__main__":
    raise SystemExit(main())
