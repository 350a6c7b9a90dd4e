"""What a stack's machines cost, from the catalogue of list prices that gpuhunt (dstack's own) publishes; kept for a day.

    python -m infra.prices STACK        of each fleet; --json for programs

Machines alone; what else of a plan is paid for is named by `left_out`. Where the catalogue cannot be had, the dated list beside each
cloud's program, prices.csv, stands in. It has no spot prices: the on-demand price, which spot never exceeds, is the most they can be.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import requests
from gpuhunt import CatalogItem
from gpuhunt._internal import storage
from gpuhunt._internal.catalog import CATALOG_URL

from stacks.errors import UserError
from stacks.host import command_line
from stacks.host.project import project_root
from stacks.load import load
from stacks.places import PLACES, cloud_of, control_of
from stacks.schema import Fleet, Stack

HOURS = 730  # of a month
FRESH = 24 * 60 * 60  # seconds for which a downloaded catalogue is good
DEADLINE = (4, 20)  # seconds to connect, and between two pieces of the answer


class PricesUnknown(Exception):
    """No catalogue; its text says why."""


@dataclass(frozen=True)
class FleetCost:
    """`each`: USD per hour and node, None where no list price says it; `why` then."""

    fleet: str
    machine: str
    nodes: int
    each: float | None
    why: str = ""
    at_most: bool = False  # dstack ends machines that are idle

    @property
    def hourly(self) -> float | None:
        return None if self.each is None else self.each * self.nodes

    def line(self) -> str:
        what = f"{self.fleet}: {self.nodes} x {self.machine}"
        if self.hourly is None:
            return f"{what}: price not known, {self.why}"
        return f"{what}: {'at most ' if self.at_most else ''}{_usd(self.hourly)}"


@dataclass(frozen=True)
class Cost:
    """What all machines of a stack cost, in USD; None as soon as one of them is not known. `dated`: of which day, where not today's."""

    fleets: tuple[FleetCost, ...]
    dated: str = ""

    @property
    def hourly(self) -> float | None:
        known = [fleet.hourly for fleet in self.fleets if fleet.hourly is not None]
        return sum(known) if len(known) == len(self.fleets) else None

    @property
    def monthly(self) -> float | None:
        return None if self.hourly is None else self.hourly * HOURS

    @property
    def at_most(self) -> bool:
        return any(fleet.at_most for fleet in self.fleets)

    def lines(self) -> list[str]:
        """What a person reads: each fleet, where all are known and several, their sum, and of which day the prices are."""
        said = [fleet.line() for fleet in self.fleets]
        if len(self.fleets) > 1 and self.hourly is not None:
            said.append(f"in all: {_usd(self.hourly)}")
        return [*said, self.dated] if self.dated else said


def _usd(hourly: float) -> str:
    return f"{hourly:,.2f} USD an hour, {hourly * HOURS:,.0f} a month"


@dataclass(frozen=True)
class Listed:
    """USD an hour of a machine type, None where no list says it."""

    usd: float | None
    at_most: bool = False

    def line(self) -> str:
        return "price not known" if self.usd is None else f"{'at most ' if self.at_most else ''}{_usd(self.usd)}"


def cost(stack: Stack) -> Cost:
    """Of a stack on a cloud. Raises PricesUnknown."""
    return priced(stack, *_offers(stack))


def _offers(stack: Stack) -> tuple[list[CatalogItem], str]:
    """Today's, else the bundled ones, with what they are then. Raises PricesUnknown."""
    try:
        return catalogue(stack.cloud), ""
    except PricesUnknown as reason:
        day, items = bundled(stack.cloud, reason)
        return items, f"list prices of {day}; today's could not be had: {reason}"


def listed(stack: Stack, wanted: Iterable[tuple[str, bool]]) -> dict[tuple[str, bool], Listed]:
    """Of machine types in the stack's region, by type and whether it is spot; without a spot price the one on demand is the most it is."""
    wanted = set(wanted)
    try:
        items = [item for item in _offers(stack)[0] if _near(stack, item.location)] if wanted else []
    except PricesUnknown:
        items = []
    found: dict[tuple[str, bool], Listed] = {}
    for machine, spot in wanted:
        kinds = ("spot" if spot else "on-demand", "on-demand")
        exact, on_demand = (_priced(stack, machine, machine, 1, items, kind).each for kind in kinds)
        found[machine, spot] = Listed(on_demand if exact is None else exact, exact is None)
    return found


def priced(stack: Stack, items: Iterable[CatalogItem], dated: str = "") -> Cost:
    """Pure: the fleets by the catalogue's prices for the stack's region and zones, or by those of the bundled list, which is `dated`."""
    wanted = {fleet.machine for fleet in stack.fleets}
    wanted |= {machine for _, machine in _beside(stack)}
    near = [item for item in items if item.instance_name in wanted and _near(stack, item.location)]
    beside = (_priced(stack, name, machine, 1, near) for name, machine in _beside(stack))
    return Cost((*(_fleet(stack, fleet, near, bound=bool(dated)) for fleet in stack.fleets), *beside), dated)


def _beside(stack: Stack) -> list[tuple[str, str]]:
    """Machines that are in no fleet, by name: the control node."""
    control = control_of(stack)
    return [("control node", control.machine)] if control else []


def _near(stack: Stack, location: str) -> bool:
    """Most catalogues, and the bundled lists, have one price for a region, some list each zone."""
    cloud = cloud_of(stack)
    zones = stack.network.zones if cloud and cloud.zonal_prices else ()
    return location == stack.region or (location in zones if zones else location.startswith(f"{stack.region}-"))


def _fleet(stack: Stack, fleet: Fleet, items: list[CatalogItem], bound: bool) -> FleetCost:
    """`bound`: spot is priced by what it costs at most."""
    assert fleet.machine  # stacks/rules.py
    at_most = fleet.provision == "dstack"
    kind = fleet.capacity.kind
    if kind in ("block", "flex-start"):
        why = "a capacity block is paid when it is bought" if kind == "block" else "flex-start has prices of its own"
        return FleetCost(fleet.name, fleet.machine, fleet.nodes, None, why)
    if stack.backends:  # at another cloud a node may be dearer
        why = "" if fleet.max_price else "its nodes may be at other clouds too, and fleets.max_price does not say what one may cost"
        return FleetCost(fleet.name, fleet.machine, int(fleet.nodes), fleet.max_price, why, True)
    if kind == "spot" and bound:
        kind, at_most = "on-demand", True
    cost = _priced(stack, fleet.name, fleet.machine, int(fleet.nodes), items, kind, at_most)
    return replace(cost, nodes=min(cost.nodes, fleet.pays_for(cost.each)))


def _priced(
    stack: Stack, name: str, machine: str, count: int, items: list[CatalogItem], kind: str = "on-demand", at_most: bool = False
) -> FleetCost:
    """What is reserved costs the same as on demand, used or not."""
    prices = [item.price for item in items if item.instance_name == machine and item.spot == (kind == "spot")]
    if not prices:
        return FleetCost(name, machine, count, None, f"the catalogue has no {kind} price in {stack.region}", at_most)
    return FleetCost(name, machine, count, max(prices), "", at_most)  # of the dearest zone: nobody knows which it will be


def left_out(billed: Mapping[str, Callable[[dict[str, Any]], str]], resources: Iterable[tuple[str, dict[str, Any]]]) -> str:
    """What of a plan is paid for beside its machines: `billed` says it by the type of a resource, from its inputs."""
    counted = Counter(billed[kind](inputs) for kind, inputs in resources if kind in billed)
    items = [f"{count} x {what}" if count > 1 else what for what, count in sorted(counted.items())]
    return ", ".join([*items, "disks, requests and traffic"])


def catalogue(provider: str) -> list[CatalogItem]:
    """All offers of a cloud: from $GPUHUNT_CATALOG_DIR, from what was downloaded today, or downloaded now. Raises PricesUnknown.

    Where the download fails, an older one is still better than nothing.
    """
    if folder := os.getenv("GPUHUNT_CATALOG_DIR"):
        return _read(Path(folder) / f"{provider}.csv", provider)
    kept = _folder() / f"{provider}.csv"
    if not kept.exists() or time.time() - kept.stat().st_mtime > FRESH:
        try:
            _keep(kept, _download(provider))
        except (requests.RequestException, zipfile.BadZipFile, KeyError, OSError) as error:
            if not kept.exists():
                raise PricesUnknown(f"gpuhunt's catalogue cannot be had: {type(error).__name__}") from error
    return _read(kept, provider)


def bundled(provider: str, otherwise: PricesUnknown) -> tuple[str, list[CatalogItem]]:
    """The list of a cloud that comes with this project, and its day. Raises `otherwise` for a cloud without one."""
    listed = files(PLACES[provider].program) / "prices.csv"
    if not listed.is_file():
        raise otherwise
    return dated(listed.read_text(), provider)


def dated(text: str, provider: str) -> tuple[str, list[CatalogItem]]:
    """The day of a list that comes with this project, which its first line begins with, and what it has."""
    lines = text.splitlines(keepends=True)
    rows = io.StringIO("".join(line for line in lines if not line.startswith("#")))
    return lines[0].removeprefix("# ").partition(":")[0], list(storage.load(rows, provider=provider))


def _folder() -> Path:
    return Path(os.getenv("XDG_CACHE_HOME") or Path.home() / ".cache") / "flotilla" / "prices"


def _download(provider: str) -> bytes:
    base = os.getenv("GPUHUNT_CATALOG_URL", CATALOG_URL).rstrip("/")  # as gpuhunt itself
    with requests.Session() as session:
        version = _get(session, f"{base}/{provider}/version").decode().strip()
        archive = _get(session, f"{base}/{provider}/{version}/catalog.zip")
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        return opened.read(f"{provider}.csv")


def _get(session: requests.Session, url: str) -> bytes:
    answer = session.get(url, timeout=DEADLINE)
    answer.raise_for_status()
    return answer.content


def _keep(file: Path, content: bytes) -> None:
    """Complete or not at all: another preview may read it meanwhile."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_suffix(f".{os.getpid()}")
    draft.write_bytes(content)
    draft.replace(file)


def _read(file: Path, provider: str) -> list[CatalogItem]:
    try:
        with file.open(newline="") as lines:
            return list(storage.load(lines, provider=provider))
    except (OSError, ValueError, KeyError) as error:
        raise PricesUnknown(f"{file} cannot be read: {error}") from error


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m infra.prices", description="What the machines of a stack on a cloud cost.")
    command_line.add_stack(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options: Any = parser.parse_args(arguments)
    try:
        stack = load(options.stack, project_root())
        if cloud_of(stack) is None:
            raise UserError(f"flotilla:cloud: {stack.cloud} has no list of prices; flotilla:monitoring.price says what a node costs")
        found = cost(stack)
    except (UserError, PricesUnknown) as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(asdict(found)) if options.json else "\n".join(found.lines()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
