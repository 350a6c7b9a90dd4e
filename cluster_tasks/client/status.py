"""One screen about a stack: its machines with price and age, the run, Ray's nodes, the jobs, the last checkpoint, the cost so far.

    flotilla status onprem
    flotilla status onprem --json

Asks the dstack server, and the dashboard where it is forwarded (`dstack attach`, or a launch that watches a job).
Exit codes: 0 healthy; 1 not: the cluster is not up, misses a node, has a machine that does not answer; 2 where it cannot be asked.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

if __name__ == "__main__":  # before imports that this environment may not have
    from stacks.host.extras import explain_missing

    explain_missing()

from rich.console import Console
from rich.table import Table

from cluster_tasks.client.cluster import cluster
from cluster_tasks.client.dstack_run import ROOT, DstackRun
from cluster_tasks.client.elastic import NO_ELASTIC, Elastic
from cluster_tasks.client.jobs import Job
from cluster_tasks.client.machines import Machine, elastic_nodes, hours, machines
from cluster_tasks.client.usage import PRICE_HINT, look, per_1000_steps, pool_lines, queue_lines
from cluster_tasks.identity import WrongCluster
from cluster_tasks.price import hourly
from stacks.dstack_api import JobStatus, Run
from stacks.errors import UserError
from stacks.host import command_line
from stacks.host.forward import LOOK_SECONDS, forwarded
from stacks.load import load
from stacks.schema import Stack


@dataclass(frozen=True)
class Status:
    """What was found out about a stack."""

    stack: str
    machines: list[Machine]
    run: str | None  # its status at dstack; None where there is none
    nodes: list[str] = field(default_factory=list)  # status of each, in order of rank
    ray_nodes: int | None = None  # ALIVE; None where the dashboard is not forwarded
    jobs: list[Job] = field(default_factory=list)
    run_cost: float = 0.0  # dollars, as dstack counts it over all attempts of the run
    gpu_idle_share: float | None = None  # now; None where the dashboard is not forwarded, or has no GPUs
    trouble: list[str] = field(default_factory=list)
    serving: Elastic = NO_ELASTIC
    queue: dict[str, Any] | None = None
    pools: list[dict[str, Any]] = field(default_factory=list)  # of sandboxes

    @property
    def cost(self) -> float:
        """Of the machines that there are, in dollars."""
        return sum(machine.cost for machine in self.machines)


def find(stack: Stack, run: DstackRun, now: datetime) -> Status:
    """Asks the server and the dashboard. Raises ClusterError, ConnectionFailed."""
    names = {fleet.name for fleet in stack.dstack_fleets()}
    fleets = [fleet for fleet in run.fleets() if fleet.name in names]
    made, found = machines(stack, fleets, now), run.get()
    stranger = []
    try:
        ray_nodes = run.dashboard.alive_nodes()
    except WrongCluster as error:  # it got no token, and its jobs are not this stack's
        ray_nodes, stranger = None, [str(error)]
    alive = None if ray_nodes is None else len(ray_nodes)
    usage = None
    with suppress(OSError):  # the forward broke while we looked
        usage = look(run.dashboard, now.timestamp(), None) if ray_nodes is not None else None
    nodes = [job.job_submissions[-1].status.value for job in found.jobs] if found and not found.status.is_finished() else []
    trouble = [f"machine {machine.name}: {machine.trouble}" for machine in made if machine.trouble]
    trouble += [f"no fleet {name}" for name in sorted(names - {fleet.name for fleet in fleets})]
    trouble += run_trouble(run.name, found, alive) + stranger
    state = found.status.value if found else None
    serving = Elastic.of(stack, elastic_nodes(stack, run), run.dashboard if alive is not None else None)
    trouble += serving.short if found and not found.status.is_finished() else []
    jobs, idle, queue, pools = (usage.jobs, usage.idle, usage.queue, usage.pools) if usage else ([], None, None, [])
    return Status(stack.name, made, state, nodes, alive, jobs, run_cost(stack, found, now), idle, trouble, serving, queue, pools)


def run_cost(stack: Stack, run: Run | None, now: datetime) -> float:
    """As dstack counts it; of machines without a price there, by that of the stack file, since the run was submitted."""
    price = hourly(stack)
    if run is None or run.cost or price is None or run.status.is_finished():
        return run.cost if run else 0.0
    return price * hours(run.submitted_at, now)


def run_trouble(name: str, run: Run | None, ray_nodes: int | None) -> list[str]:
    if run is None or run.status.is_finished():
        return [f"the run {name} is {'not there' if run is None else run.status.value}"]
    states = [job.job_submissions[-1].status for job in run.jobs]
    waiting = [f"node {rank} is {state.value}" for rank, state in enumerate(states) if state != JobStatus.RUNNING]
    if not waiting and ray_nodes is not None and ray_nodes < len(states):
        return [f"Ray has {ray_nodes} of {len(states)} nodes"]
    return waiting


def show(status: Status, run: DstackRun, before: str = "") -> None:
    """`before` an attach by hand something else is typed."""
    console = Console(emoji=False, highlight=False, soft_wrap=True)
    table = Table("machine", "state", "type", "region", "$ an hour", "hours", "$ so far", box=None)
    for machine in status.machines:
        numbers = f"{machine.price:.2f}", f"{machine.hours:.1f}", f"{machine.cost:.2f}"
        table.add_row(machine.name, machine.status, machine.kind or "", machine.region or "", *numbers)
    console.print(table if status.machines else "no machines")
    console.print(f"run {run.name}: {status.run or 'not there'}{': nodes ' + ', '.join(status.nodes) if status.nodes else ''}")
    if status.ray_nodes is None:
        console.print(f"Ray: not forwarded to this machine; {before}dstack attach {run.name}")
    else:
        console.print(f"Ray: {status.ray_nodes} nodes alive, {run.dashboard.url}")
    for shown in (*status.serving.nodes, *status.serving.engines):
        console.print(shown.line(), markup=False)
    for job in status.jobs:
        console.print(f"job {job.name}  {job.status}  {job.hours:.1f} h  {job.command}", markup=False)
        for line in job.progress.lines() if job.progress else ():
            console.print(f"    {line}", markup=False)
    for line in (*queue_lines(status.queue), *pool_lines(status.pools)):
        console.print(line, markup=False)
    if status.gpu_idle_share is not None:
        console.print(f"GPUs idle now: {status.gpu_idle_share:.0%}")
    each_hour = sum(machine.price for machine in status.machines)
    unknown = sum(not machine.price for machine in status.machines)
    left_out = f"; {unknown} machines have no price: {PRICE_HINT}" if unknown else ""
    console.print(f"cost so far: ${status.cost:.2f} for the machines that are there, ${status.run_cost:.2f} for this run{left_out}")
    for job in status.jobs:
        per = per_1000_steps(each_hour, job.progress)
        if each_hour and per is not None:
            console.print(f"cost of {job.name}: ${each_hour * job.hours:.2f}, ${per:.2f} per 1,000 steps")
    for line in status.trouble:
        console.print(f"not healthy: {line}", markup=False)


def status_json(status: Status) -> dict[str, Any]:
    known = {name: value for name, value in asdict(status).items() if name != "serving"}
    return known | status.serving.as_json() | {"cost": round(status.cost, 2), "healthy": not status.trouble}


def show_stack(stack: Stack, as_json: bool) -> int:
    """Exit code 1 where something is not healthy. Raises UserError."""
    with forwarded(stack, LOOK_SECONDS, lambda line: print(line, file=sys.stderr)):
        run = cluster(stack, None)
        status = find(stack, run, datetime.now(UTC))
    if as_json:
        print(json.dumps(status_json(status), indent=2))
    else:
        show(status, run, f"flotilla server forward {stack.name}, then " if stack.control_node else "")
    return 1 if status.trouble else 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m cluster_tasks.client.status", description="One screen about a stack's cluster on dstack."
    )
    command_line.add_stack(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options: Any = parser.parse_args(argv)
    try:
        return show_stack(load(options.stack, ROOT), options.json)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
