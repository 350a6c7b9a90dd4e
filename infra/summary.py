"""What a stack is, in five lines, before all that a preview lists: hosts, GPUs, what they cost at work and idle, and the budget."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stacks.places import gpus, machines, place_of
from stacks.schema import Fleet, Gpu, Stack

if TYPE_CHECKING:
    from infra.prices import Cost  # with what downloads a catalogue; only who asks waits for it

HOURS = 730  # of a month
PRICE = "flotilla:monitoring.price says what a node costs"


@dataclass(frozen=True)
class Summary:
    """Prices in USD an hour; None where nobody knows them, and `why`. `at_most`: dstack ends idle machines, or finds cheaper ones."""

    hosts: int
    gpus: int
    hourly: float | None
    idle: float | None
    why: str
    at_most: bool
    of_hosts: str
    of_gpus: str
    of_idle: str
    budget: str

    def lines(self) -> list[str]:
        known = f"{'at most ' if self.at_most else ''}{_usd(self.hourly)}" if self.hourly else "0"
        known = f"not known: {self.why}" if self.hourly is None else known
        idle = (
            f"not known: {self.why}" if self.idle is None else f"{_usd(self.idle)}, {self.idle * HOURS:,.0f} a month" if self.idle else "0"
        )
        rows = {
            "hosts": f"{self.hosts} ({self.of_hosts})",
            "GPUs": f"{self.gpus} ({self.of_gpus})" if self.gpus else "0",
            "price": known,
            "idle": f"{idle}{f' ({self.of_idle})' if self.of_idle else ''}",
            "budget": self.budget or "none",
        }
        return [f"{name:<8}{text}" for name, text in rows.items()]


def summary(stack: Stack, cost: Cost | None = None, why: str = "") -> Summary:
    """`cost`: of the machines of a cloud, or None and the reason."""
    place, own = place_of(stack), _gpus(stack)
    each = [f"{fleet.name}: {fleet.nodes} x {fleet.machine}" if fleet.machine else f"{fleet.name}: {fleet.nodes}" for fleet in stack.fleets]
    kinds = [f"{fleet.name}: {gpu.count} x {gpu.name or 'any'} each" for fleet in stack.fleets if (gpu := own.get(fleet.name))]
    if place.cloud:
        hourly, idle, reason = (cost.hourly, _idle(stack, cost), _unpriced(cost)) if cost else (None, None, why)
        at_most, said = cost is not None and cost.at_most, _ends(stack)
    elif not place.remote:
        hourly, idle, reason, at_most, said = 0.0, 0.0, "", False, "nodes are processes of this machine"
    else:
        hourly, at_most = _said(stack)
        kept = not place.batch and (not place.launches or any(_stays(fleet) for fleet in stack.fleets))
        idle, reason = hourly if kept else 0.0, PRICE
        said = (
            ""
            if not place.remote
            else "nodes come with jobs"
            if place.batch
            else _ends(stack)
            if place.launches
            else "the hosts are there anyway"
        )
    return Summary(
        sum(int(fleet.nodes) for fleet in stack.fleets),
        sum(int(fleet.nodes) * own[fleet.name].count for fleet in stack.fleets if fleet.name in own),
        hourly,
        idle,
        reason,
        at_most,
        ", ".join(each),
        ", ".join(kinds),
        said,
        ", ".join(_budgets(stack)),
    )


def remark(stack: Stack, found: Summary) -> str | None:
    """Of a budget that the stack is over before anything runs."""
    if stack.budget is None or stack.budget.currency != "USD" or not found.idle or found.idle * HOURS <= stack.budget.monthly:
        return None
    return (
        f"flotilla:budget.monthly: {stack.budget.monthly:,g} USD is below what the machines cost where nothing runs, "
        f"{found.idle * HOURS:,.0f} a month; the budget ends nothing, it sends mail"
    )


def _gpus(stack: Stack) -> dict[str, Gpu]:
    if place_of(stack).cloud:
        return gpus(machines(stack))
    return {fleet.name: fleet.gpu for fleet in stack.fleets if fleet.gpu and fleet.gpu.count}


def _stays(fleet: Fleet) -> bool:
    """Whether its machines are there while nothing runs."""
    return fleet.provision == "pulumi" or fleet.idle_duration == "off"


def _idle(stack: Stack, cost: Cost) -> float | None:
    """Of machines that stay, and of what is in no fleet, such as a control node."""
    fleets = {fleet.name: fleet for fleet in stack.fleets}
    kept = [each.hourly for each in cost.fleets if each.fleet not in fleets or _stays(fleets[each.fleet])]
    return None if None in kept else sum(price for price in kept if price is not None)


def _unpriced(cost: Cost) -> str:
    return "; ".join(f"{each.fleet}: {each.why}" for each in cost.fleets if each.hourly is None)


def _ends(stack: Stack) -> str:
    waits = {fleet.idle_duration or "15m" for fleet in stack.fleets if not _stays(fleet)}
    return f"dstack ends machines after {' or '.join(sorted(waits))} without work" if waits else ""


def _said(stack: Stack) -> tuple[float | None, bool]:
    """What the stack file says of its nodes' price, and whether that is the most."""
    each = [stack.monitoring.price if stack.monitoring.price is not None else fleet.max_price for fleet in stack.fleets]
    if None in each:
        return None, False
    priced = zip(stack.fleets, (price for price in each if price is not None), strict=True)
    return sum(int(fleet.nodes) * price for fleet, price in priced), stack.monitoring.price is None


def _budgets(stack: Stack) -> Iterator[str]:
    if stack.budget:
        yield f"{stack.budget.monthly:,g} {stack.budget.currency} a month"
    for fleet in stack.fleets:
        if fleet.hourly_budget is not None:
            yield f"{fleet.name}: {fleet.hourly_budget:,g} USD an hour"


def _usd(hourly: float) -> str:
    return f"{hourly:,.2f} USD an hour"
