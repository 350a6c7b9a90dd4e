"""Where a stack's nodes can be had now, and for how much: the offers of its backends that fit each fleet, the cheapest first.

By gpuhunt's catalogue, the one that dstack's server plans with; kept for a day. Where it cannot be had, the dated list that comes with
this project stands in, which is a part of what there is. Of backends whose offers dstack asks the cloud itself for, with your key, only
the server knows: `dstack offer` lists them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from gpuhunt import CatalogItem
from rich import box
from rich.console import Console
from rich.table import Table

from infra import prices
from stacks.errors import UserError
from stacks.host import command_line
from stacks.host.project import project_root
from stacks.load import load
from stacks.places import PLACES, gpu_of, like, machines, place_of
from stacks.schema import Fleet, Gpu, Stack
from stacks.settings.backends import BACKENDS, BackendEntry
from stacks.settings.fields import gigabytes

RENTED = [name for name, place in PLACES.items() if place.cloud or place.launches]
PAID_APART = {"block": "a capacity block is paid when it is bought", "flex-start": "flex-start has prices of its own"}
SHOWN = 15  # offers of a fleet, where --all does not ask for more


@dataclass(frozen=True)
class Listed:
    """What a backend sells; `dated`: by the list of which day, where today's cannot be had. `why`: nobody here knows what it sells."""

    backend: str
    items: tuple[CatalogItem, ...] = ()
    dated: str = ""
    why: str = ""


@dataclass(frozen=True)
class Offer:
    """One node: `price` in USD an hour, memory in GB, `gpu_memory` of each GPU."""

    backend: str
    region: str
    machine: str
    cpus: int
    memory: float
    gpu: str | None
    gpus: int
    gpu_memory: float | None
    price: float
    spot: bool
    cluster: str  # the network between nodes of one cluster; empty where there is none


@dataclass(frozen=True)
class Wanted:
    """What a fleet asks of one node, and where it may be."""

    gpu: Gpu | None
    cpus: int
    memory: float  # GB
    machine: str | None  # the fleet takes this type alone
    regions: tuple[str, ...]  # or zones, where the fleet is in these alone
    max_price: float | None
    spot: bool | None  # None: either
    several: bool  # nodes that need a network between them
    arch: str = "x86"
    most_memory: float | None = None  # GB; to dstack 64GB is no more and no less


def wanted(stack: Stack, fleet: Fleet) -> Wanted:
    """Of a cloud's fleet by its machine type."""
    gpu, kind = fleet.gpu, machines(stack)[fleet.name] if place_of(stack).cloud else None
    if kind:
        gpu = gpu_of(kind)
    if kind and stack.backends:
        fleet = like(kind, fleet)
    regions = (stack.region,) if stack.region and not stack.backends else fleet.regions
    if kind and not stack.backends and (cloud := place_of(stack).cloud) and cloud.zonal_prices:
        regions = stack.network.zones or regions
    least, dots, most = (fleet.memory or "0GB..").partition("..")
    most = most if dots else least
    return Wanted(
        gpu,
        fleet.cpus or 0,
        gigabytes(least),
        fleet.machine,
        regions,
        fleet.max_price,
        fleet.capacity.kind == "spot",
        not fleet.elastic and fleet.nodes > 1,
        fleet.arch,
        gigabytes(most) if most else None,
    )


def entries(stack: Stack) -> list[BackendEntry]:
    """Where the stack's machines may be; of a cloud that cloud, and what it falls back to."""
    regions = [stack.region] if stack.region else []
    own = [BackendEntry.model_construct(type=stack.cloud, credentials=None, regions=regions)] if stack.cloud in BACKENDS else []
    return [*own, *stack.backends]


@cache
def listed(backend: str) -> Listed:
    """Today's catalogue, else the bundled list."""
    known = BACKENDS[backend]
    if not known.catalogue:
        return Listed(backend, why="dstack asks the cloud itself, with your key")
    try:
        return Listed(backend, tuple(prices.catalogue(known.catalogue)))
    except prices.PricesUnknown as reason:
        if backend in PLACES:
            day, items = prices.bundled(backend, reason)
            return Listed(backend, tuple(_with_gpus(backend, items)), day)
        file = files("infra.backends") / "prices" / f"{backend}.csv"
        if not file.is_file():
            return Listed(backend, why=str(reason))
        day, items = prices.dated(file.read_text(), known.catalogue)
        return Listed(backend, tuple(items), day)


def _with_gpus(cloud: str, items: Iterable[CatalogItem]) -> Iterator[CatalogItem]:
    """The bundled lists of our own clouds leave the GPUs to the table of machine types."""
    rented = PLACES[cloud].cloud
    kinds = {kind.name: kind for kind in (rented.machines if rented else ())}
    for item in items:
        kind = kinds.get(item.instance_name)
        yield replace(item, gpu_name=kind.gpu, gpu_memory=kind.gpu_memory) if kind and kind.gpu else item


def fitting(entry: BackendEntry, found: Listed, want: Wanted) -> list[Offer]:
    """Pure: the offers of one backend that fit, unsorted; none where nodes need a network that it does not have."""
    known = entry.known
    if want.several and not known.cluster:
        return []
    regions = [each.lower() for each in want.regions]
    own = [each.lower() for each in entry.regions]
    return [
        Offer(
            entry.type,
            item.location,
            item.instance_name,
            item.cpu,
            item.memory,
            item.gpu_name,
            item.gpu_count,
            item.gpu_memory,
            item.price,
            item.spot,
            known.cluster,
        )
        for item in found.items
        if _fits(item, want) and _within(item.location, regions) and _within(item.location, own)
    ]


def _within(location: str, regions: list[str]) -> bool:
    """Some catalogues list zones in place of regions."""
    place = location.lower()
    return not regions or any(place == region or place.startswith(f"{region}-") for region in regions)


def _fits(item: CatalogItem, want: Wanted) -> bool:
    if want.spot is not None and item.spot != want.spot:
        return False
    if want.max_price is not None and item.price > want.max_price:
        return False
    if want.machine is not None:
        return item.instance_name == want.machine
    most = item.memory if want.most_memory is None else want.most_memory
    return item.cpu >= want.cpus and want.memory <= item.memory <= most and item.cpu_arch.value == want.arch and _has(item, want.gpu)


def _has(item: CatalogItem, gpu: Gpu | None) -> bool:
    """To dstack a size is neither less nor more: an A100 of 80 GB is none of 40."""
    if gpu is None or not gpu.count:
        return item.gpu_count == 0
    named = gpu.name is None or (item.gpu_name or "").lower() == gpu.name.lower()
    made = item.gpu_vendor is None or item.gpu_vendor.value == gpu.vendor
    return item.gpu_count == gpu.count and named and made and (gpu.memory is None or (item.gpu_memory or 0) == gigabytes(gpu.memory))


def offers(stack: Stack, fleet: Fleet, look: Callable[[str], Listed] = listed) -> list[Offer]:
    """Of all backends, the cheapest first; equal ones by name."""
    if fleet.capacity.kind in PAID_APART:
        return []
    want = wanted(stack, fleet)
    found = [offer for entry in entries(stack) for offer in fitting(entry, look(entry.type), want)]
    return sorted(found, key=lambda offer: (offer.price, offer.backend, offer.region, offer.machine))


def nothing(stack: Stack, fleet: Fleet, look: Callable[[str], Listed] = listed) -> str:
    """Why no offer fits a fleet: the first of what it asks for without which some would."""
    index, want = stack.fleets.index(fleet), wanted(stack, fleet)
    at, known = f"flotilla:fleets[{index}]", entries(stack)
    names = ", ".join(entry.type for entry in known)
    if fleet.capacity.kind in PAID_APART:
        return f"{at}.capacity.kind: {fleet.capacity.kind}: {PAID_APART[fleet.capacity.kind]}, so no offer is for it"

    def cheapest(**less: Any) -> Offer | None:
        asked = replace(want, **less)
        found = [offer for entry in known for offer in fitting(entry, look(entry.type), asked)]
        return min(found, key=lambda offer: offer.price, default=None)

    if offer := cheapest(max_price=None):
        return f"{at}.max_price: {want.max_price:g} USD an hour is under every offer of {names}; the cheapest is {shown(offer)}"
    if offer := cheapest(max_price=None, regions=()):
        return f"{at}.regions: {', '.join(want.regions)}: none of {names} sells it there; {shown(offer)}"
    if offer := cheapest(max_price=None, regions=(), spot=None):
        kinds = ("on-demand", "spot")
        if want.spot and (silent := [entry.type for entry in known if entry.known.spot and _without_spot(look(entry.type))]):
            most = f", which is the most that spot is: {shown(offer)}" if offer.backend in silent else f"; on-demand is {shown(offer)}"
            return f"{at}.capacity.kind: spot: the list of {', '.join(silent)} has on-demand prices alone{most}"
        return f"{at}.capacity.kind: {kinds[bool(want.spot)]}: none of {names} sells it so; {kinds[offer.spot]} is {shown(offer)}"
    offer = cheapest(max_price=None, regions=(), spot=None, cpus=0, memory=0.0, most_memory=None)
    return f"{at}{_not_sold(want, [look(entry.type) for entry in known], offer)} (backends: {names})"


def _without_spot(found: Listed) -> bool:
    """Of a list that comes with this project, or of a backend whose offers nobody here knows."""
    return not any(item.spot for item in found.items)


def _not_sold(want: Wanted, lists: list[Listed], nearest: Offer | None) -> str:
    """Of machines that no backend has, wherever and however."""
    gpu = want.gpu
    if gpu is None or not gpu.name:
        return ": no such machine is sold"
    if nearest:
        return f": no machine with {gpu.count} x {gpu.name} has {want.cpus} CPUs and {want.memory:g} GB; the nearest is {shown(nearest)}"
    sold = [item for each in lists for item in each.items if item.gpu_name]
    counts = sorted({item.gpu_count for item in sold if (item.gpu_name or "").lower() == gpu.name.lower()})
    if counts:
        return f".gpu.count: {gpu.count}: machines are sold with {', '.join(map(str, counts))} x {gpu.name}, in one network or not"
    return f".gpu.name: {gpu.name!r} is sold by none; sold are {', '.join(sorted({item.gpu_name or '' for item in sold})) or 'no GPUs'}"


def shown(offer: Offer) -> str:
    return f"{offer.machine} of {offer.backend} in {offer.region} for {offer.price:g}"


def unknowns(stack: Stack, look: Callable[[str], Listed] = listed) -> list[Listed]:
    """Backends of which only the server knows what they sell."""
    return [found for entry in entries(stack) if (found := look(entry.type)).why]


def table(fleet: Fleet, found: list[Offer]) -> Table:
    """A row for each machine and price; of its regions the first."""
    nodes = int(fleet.nodes)
    made = Table(box=box.SIMPLE_HEAD, title=f"fleet {fleet.name}: {nodes} node{'s' if nodes > 1 else ''}", title_justify="left")
    sides = {
        "USD/h": "right",
        **({"all": "right"} if nodes > 1 else {}),
        "": "left",
        "backend": "left",
        "region": "left",
        "machine": "left",
    }
    for name, side in (sides | {"GPUs": "right", "CPUs": "right", "GB": "right"}).items():
        made.add_column(name, justify=side, no_wrap=name != "machine")  # type: ignore[arg-type]
    for offers in rows(found):
        offer, more = offers[0], f" +{len(offers) - 1}" if len(offers) > 1 else ""
        prices = [f"{offer.price:,.2f}", *([f"{offer.price * nodes:,.2f}"] if nodes > 1 else [])]
        where = "spot" if offer.spot else "", offer.backend, offer.region + more, offer.machine
        made.add_row(*prices, *where, f"{offer.gpus} x {offer.gpu}" if offer.gpu else "-", str(offer.cpus), f"{offer.memory:g}")
    return made


def rows(found: list[Offer]) -> list[list[Offer]]:
    """Offers that differ in their regions alone, together."""
    alike: dict[Any, list[Offer]] = {}
    for offer in found:
        alike.setdefault((offer.price, offer.spot, offer.backend, offer.machine), []).append(offer)
    return list(alike.values())


ABOUT = """\
List current offers of the stack's backends that fit each fleet, cheapest first.
Prices are gpuhunt's, kept for a day; offline, from the dated list shipped here.
Some backends tell their offers only to the dstack server: see `dstack offer`.
Exit code 0: every fleet has an offer. 1: one has none. 2: an error."""


def main(arguments: list[str] | None = None, prog: str = "python -m infra.backends.offers") -> int:
    parser = command_line.parser(prog, ABOUT, ("flotilla offers anywhere", "flotilla offers aws-dev --spot --json"))
    command_line.add_stack(parser)
    parser.add_argument("--json", action="store_true", help="print all offers as one JSON object")
    parser.add_argument("--spot", action="store_true", help="only spot machines, instead of the stack file's choice")
    parser.add_argument("--all", action="store_true", help=f"all offers, not only the {SHOWN} cheapest per fleet")
    options: Any = parser.parse_args(arguments)
    try:
        stack = load(options.stack, project_root())
        if not entries(stack):
            raise UserError(f"flotilla:cloud: {stack.cloud} rents out no machines; offers are for {', '.join(RENTED)}")
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    if options.spot:
        capacity = [fleet.model_copy(update={"capacity": fleet.capacity.model_copy(update={"kind": "spot"})}) for fleet in stack.fleets]
        stack = stack.model_copy(update={"fleets": tuple(capacity)})
    found = {fleet.name: offers(stack, fleet) for fleet in stack.fleets}
    lists = [listed(entry.type) for entry in entries(stack)]
    if options.json:
        sources = {each.backend: each.why or (f"list of {each.dated}" if each.dated else "today's catalogue") for each in lists}
        print(
            json.dumps({"offers": {name: [asdict(offer) for offer in each] for name, each in found.items()}, "sources": sources}, indent=2)
        )
    else:
        _print(stack, found, lists, options.all)
    return 0 if all(found.values()) else 1


def _print(stack: Stack, found: dict[str, list[Offer]], lists: list[Listed], everything: bool) -> None:
    console = Console(emoji=False, highlight=False)
    if not console.is_terminal:
        console.width = 100
    for fleet in stack.fleets:
        cheapest = found[fleet.name]
        if not cheapest:
            console.print(nothing(stack, fleet), markup=False, soft_wrap=True)
            continue
        every = rows(cheapest)
        console.print(table(fleet, [offer for row in (every if everything else every[:SHOWN]) for offer in row]))
        if len(every) > SHOWN and not everything:
            console.print(f"{len(every) - SHOWN} more: --all", markup=False)
    for each in lists:
        if each.why:
            ask = f"dstack offer --backend {each.backend} asks the server" if not BACKENDS[each.backend].catalogue else "not compared"
            console.print(f"{each.backend}: not listed, {each.why}; {ask}", markup=False, soft_wrap=True)
        elif each.dated:
            console.print(f"{each.backend}: by the list of {each.dated}, as today's cannot be had", markup=False, soft_wrap=True)


if __name__ == "__main__":
    raise SystemExit(main())
