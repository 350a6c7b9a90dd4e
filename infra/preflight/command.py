"""Checks, before anything is created, whether a stack can be started.

A cloud: credentials, zones, quota, capacity, images, addresses, budget. Your own machines, all at once and a line each: name, port, login,
sudo, Docker, GPUs and their driver, disk, clock, shared folder, the network between them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec

from rich.console import Console
from rich.markup import escape

from infra import prices
from infra.preflight.answers import Answer, failed, ok, unknown
from stacks.errors import UserError
from stacks.host import command_line
from stacks.host.project import project_root
from stacks.load import StackError, load
from stacks.places import PLACES, machines, place_of
from stacks.places.place import Place
from stacks.schema import Stack

COLOURS = {"ok": "green", "failed": "red", "unknown": "yellow"}


def preflight(stack: Stack) -> list[Answer]:
    """What the stack's place answers. Raises StackError where there is nothing to ask there."""
    place = place_of(stack)
    if not _asks(place):
        places = ", ".join(name for name, other in PLACES.items() if _asks(other))
        text = f"flotilla:cloud: {stack.cloud} has nothing to ask; the preflight is for {places}"
        raise StackError(f"stacks/Pulumi.{stack.name}.yaml: {text}")
    asked = import_module(f"{place.program}.preflight").ask(stack, machines(stack) if place.cloud else {})
    elsewhere = import_module("infra.backends.preflight").ask(stack, {}) if place.cloud and stack.backends else []
    return [*asked, *elsewhere, budget(stack)] if place.cloud else asked


def _asks(place: Place) -> bool:
    return find_spec(f"{place.program}.preflight") is not None


def budget(stack: Stack) -> Answer:
    """Whether a month of the stack's machines fits its budget."""
    if stack.budget is None:
        return unknown("budget", "none is set", "flotilla:budget in the stack file warns somebody before the bill does")
    try:
        cost = prices.cost(stack)
    except prices.PricesUnknown as reason:
        return unknown("budget", f"prices are not known ({reason})", prices_page(stack))
    return fits(stack.budget.monthly, stack.budget.currency, cost, prices_page(stack))


def fits(monthly: float, currency: str, cost: prices.Cost, page: str) -> Answer:
    """Pure: a budget against what machines cost. Machines that dstack ends when they are idle may cost more if they never were."""
    if cost.monthly is None or cost.hourly is None:
        why = "; ".join(f"{fleet.machine}: {fleet.why}" for fleet in cost.fleets if fleet.each is None)
        return unknown("budget", f"prices are not known ({why})", page)
    dated = f" ({cost.dated})" if cost.dated else ""
    if currency != "USD":
        return unknown("budget", f"the machines cost {cost.monthly:,.0f} USD a month, the budget is in {currency}{dated}", page)
    if cost.at_most:
        hourly = sum(fleet.hourly or 0 for fleet in cost.fleets if fleet.at_most)
        always = cost.monthly - hourly * prices.HOURS
        hours = (monthly - always) / hourly
        beside = f", beside {always:,.0f} for what always runs" if round(always) else ""
        says = f"{monthly:,.0f} USD a month pay all machines for {max(hours, 0):,.0f} hours ({hourly:,.2f} USD each){beside}{dated}"
        return ok("budget", says) if hours >= 1 else failed("budget", says, "raise flotilla:budget.monthly, or take smaller machines")
    says = f"the machines cost {cost.monthly:,.0f} USD a month, the budget is {monthly:,.0f}{dated}"
    if cost.monthly > monthly:
        return failed("budget", says, "raise flotilla:budget.monthly, or take fewer or smaller machines")
    return ok("budget", says)


def prices_page(stack: Stack) -> str:
    cloud = place_of(stack).cloud
    return cloud.prices_page if cloud else ""


def lines(answers: list[Answer]) -> Iterator[str]:
    """One line for each answer, and one for its fix, in rich's markup. The terminal wraps them: a command to copy stays one line."""
    checks = max(len(answer.check) for answer in answers)
    for answer in answers:
        yield f"[{COLOURS[answer.verdict]}]{answer.verdict:<7}[/]  {answer.check:<{checks}}  {escape(answer.says)}"
        if answer.fix:
            yield f"{'':<7}  {'':<{checks}}  [cyan]{escape(answer.fix)}[/]"


ABOUT = """\
Check, before anything is created, whether a stack can be started.
Cloud: credentials, zones, quota, capacity, images, addresses, budget.
SSH hosts: name, port, login, sudo, Docker, GPUs, driver, disk, clock, shared
folder, and the network between them.
Exit code 0: no check failed. 1: one failed; its line says how to fix it. 2: an error."""


def main(arguments: list[str] | None = None, prog: str = "python -m infra.preflight") -> int:
    parser = command_line.parser(prog, ABOUT, ("flotilla preflight onprem", "flotilla preflight aws-dev --json"))
    command_line.add_stack(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON list")
    options = parser.parse_args(arguments)
    try:
        found = preflight(load(options.stack, project_root()))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps([asdict(answer) for answer in found], indent=2))
    else:
        console = Console(emoji=False, soft_wrap=True, highlight=False)
        for line in lines(found):
            console.print(line)
        count = {verdict: sum(answer.verdict == verdict for answer in found) for verdict in COLOURS}
        console.print(f"\n{options.stack}: " + ", ".join(f"{number} {verdict}" for verdict, number in count.items()))
    return 1 if any(answer.verdict == "failed" for answer in found) else 0
