"""`flotilla node`: the machines of a stack as dstack knows them, and a bad one taken out and replaced while the others go on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from cli.project import CommandError, console, run
from stacks.host import command_line
from stacks.load import load
from stacks.places import place_of
from stacks.schema import Stack

TIMEOUT = 1800
EVENTS = 3  # of a machine
LISTS = ("flotilla node list onprem", "flotilla node list onprem --json")
REPLACES = ("flotilla node replace onprem gpus-1 --restart",)


@dataclass(frozen=True)
class Node:
    """A machine of a fleet, and the run on it, if there is one."""

    name: str  # as dstack calls it
    host: str
    fleet: str
    number: int  # within its fleet
    state: str
    health: str  # healthy, warning or failure, by dstack and DCGM; unreachable where nothing answers
    price: float | None  # USD an hour
    run: str = ""
    rank: int | None = None  # within the run; 0 is the head
    id: str = ""  # dstack's

    def line(self) -> str:
        at = f"run {self.run}, node {self.rank}" if self.run else "no run"
        cost = f", {self.price:g} USD/h" if self.price else ""
        return f"{self.name}  {self.host or '-'}  {self.state}, {self.health}{cost}  {at}"


def main(verb: str, arguments: list[str], root: Path) -> int:
    prog = f"flotilla {verb}"
    parser = command_line.parser(prog, "List a stack's machines and their health, or replace one.", (*LISTS, *REPLACES))
    commands = parser.add_subparsers(dest="command", required=True, metavar="list|replace", prog=prog)
    about = "List each machine with its state, health and run. Exit code 1 if one is not healthy."
    lists = commands.add_parser("list", help="each machine's state, health and run", **command_line.settings(about, LISTS))
    about = (
        "Stop the run on a machine, return the machine to dstack, and start the run on\nanother. Other nodes keep running, but replacing "
        "a node of the cluster itself\nrestarts the cluster, which needs --restart."
    )
    replaces = commands.add_parser("replace", help="replace a machine by another", **command_line.settings(about, REPLACES))
    for command in (lists, replaces):
        command_line.add_stack(command)
    lists.add_argument("--json", action="store_true", help="print one JSON list")
    lists.add_argument("--events", action="store_true", help="last events of all machines, not only of unhealthy ones")
    replaces.add_argument("node", metavar="NODE", help="a machine's name or host, from flotilla node list")
    replaces.add_argument("--restart", action="store_true", help="allow replacing a cluster node, which restarts the cluster")
    replaces.add_argument("--timeout", type=float, default=TIMEOUT, help=f"seconds for each wait ({TIMEOUT})")
    options: Any = parser.parse_args(arguments)
    stack = load(options.stack, root)
    if place_of(stack).batch or not place_of(stack).remote:
        instead = "scontrol update nodename=NAME state=drain reason=..." if place_of(stack).batch else "its nodes are this machine"
        raise CommandError(f"flotilla {verb} is for machines that dstack drives; flotilla:cloud is {stack.cloud}: {instead}")
    os.chdir(root)
    from stacks.host.forward import forwarded

    with forwarded(stack, say=lambda line: console.print(line, markup=False)):
        if options.command == "list":
            return show(stack, as_json=options.json, events=options.events)
        return replace(stack, root, options.node, options.restart, options.timeout)


def show(stack: Stack, *, as_json: bool, events: bool) -> int:
    """Exit code 1 where a machine is not healthy."""
    from cluster_tasks.client.cluster import cluster

    dstack = cluster(stack, None)
    found = list(nodes(stack, dstack))
    last = {node: dstack.events(node.id, EVENTS) if events or node.health != "healthy" else [] for node in found}
    if as_json:
        print(json.dumps([asdict(node) | {"events": last[node]} for node in found], indent=2))
    else:
        for node in found:
            console.print("\n    ".join([node.line(), *last[node]]), markup=False)
        if not found:
            console.print(f"no machine: flotilla up {stack.name}")
    return 1 if any(node.health != "healthy" for node in found) else 0


def nodes(stack: Stack, dstack: Any) -> Iterator[Node]:
    """Of the stack's fleets, without machines that have ended."""
    at = {job.hostname: (run_.run_spec.run_name, rank) for run_, rank, job in _placed(stack, dstack)}
    names = [fleet.name for fleet in stack.dstack_fleets()]
    for fleet in dstack.fleets():
        for machine in fleet.instances if fleet.name in names else ():
            if machine.status.value == "terminated":
                continue
            health = "unreachable" if machine.unreachable else machine.health_status.value
            held = at.get(machine.hostname, ("", None))
            state = machine.status.value
            yield Node(
                machine.name, machine.hostname or "", fleet.name, machine.instance_num, state, health, machine.price, *held, str(machine.id)
            )


def _placed(stack: Stack, dstack: Any) -> Iterator[tuple[Any, int, Any]]:
    """Run, rank and place of each node that runs: of the cluster, and of elastic fleets."""
    runs = [dstack, *(each for fleet in stack.elastic_fleets() for each in dstack.of_fleet(fleet.name, fleet.nodes))]
    for found in filter(None, (each.get() for each in runs)):
        if not found.status.is_finished():
            for rank, job in enumerate(found.jobs):
                if (data := job.job_submissions[-1].job_provisioning_data) is not None:
                    yield found, rank, data


def replace(stack: Stack, root: Path, name: str, restart: bool, seconds: float) -> int:
    """Raises CommandError where there is no such machine, or the cluster would end with it and nobody said so."""
    from cluster_tasks.client.cluster import cluster
    from cluster_tasks.client.dstack_run import wait
    from cluster_tasks.ray import ROLLOUT

    dstack = cluster(stack, None)
    node = chosen(list(nodes(stack, dstack)), name)
    in_cluster = node.run == dstack.name
    if in_cluster and not restart:
        raise CommandError(
            f"{node.name} is node {node.rank} of the cluster {node.run}, whose nodes start and end together: --restart stops the cluster, "
            "replaces the machine and starts it again; `flotilla launch` and `submit --retries` resume jobs from their last checkpoint"
        )
    if node.run:
        run(["dstack", "stop", "-y", node.run], root, dstack.env)
        held = next(each for each in [dstack, *_elastic(stack, dstack)] if each.name == node.run)
        wait(lambda: f"waiting for {node.run} to end" if held.lives() else None, seconds)
        wait(lambda: _busy(stack, dstack, node), seconds)
    run(["dstack", "fleet", "delete", "-y", "-i", str(node.number), node.fleet], root, dstack.env)
    wait(lambda: f"waiting for {node.name} to go" if node.name in [each.name for each in nodes(stack, dstack)] else None, seconds)
    if node.run:
        file = "ray-cluster.dstack.yml" if in_cluster else f"{node.fleet}{ROLLOUT}"
        run(["dstack", "apply", "-y", "-d", "-n", node.run, "-f", f"build/{stack.name}/{file}"], root, dstack.env)
    if any(fleet.ssh for fleet in stack.fleets):
        console.print(
            f"{node.host} is out of fleet {node.fleet} until the fleet is applied again; take it out of the stack file", markup=False
        )
    console.print(f"{node.name} is replaced; its run starts as soon as dstack has a machine: flotilla node list {stack.name}", markup=False)
    return 0


def _elastic(stack: Stack, dstack: Any) -> list[Any]:
    return [each for fleet in stack.elastic_fleets() for each in dstack.of_fleet(fleet.name, fleet.nodes)]


def _busy(stack: Stack, dstack: Any, node: Node) -> str | None:
    """dstack deletes no machine that it still takes for busy."""
    there = next((each for each in nodes(stack, dstack) if each.name == node.name), None)
    return f"waiting for {node.name} to be free" if there and there.state == "busy" else None


def chosen(found: list[Node], name: str) -> Node:
    """By name or host. Raises CommandError, with the nearest."""
    for node in found:
        if name in (node.name, node.host):
            return node
    names = [each for node in found for each in (node.name, node.host) if each]
    near = get_close_matches(name, names, n=1)
    guess = f"; did you mean {near[0]}?" if near else ""
    listed = ", ".join(f"{node.name} ({node.host})" for node in found)
    raise CommandError(f"{name!r} is no machine of this stack{guess} (there are: {listed or 'none'})")
