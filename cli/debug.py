"""`flotilla debug`: what the processes of a cluster are doing, and an archive of all that it has written."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from cli.dashboard import dashboard
from cli.jobs import unreachable
from cli.project import CommandError, folder
from cluster_tasks.debug import gather, stacks
from stacks.load import load
from stacks.places import place_of
from stacks.schema import Stack


def main(verb: str, arguments: list[str], root: Path) -> int:
    parser = argparse.ArgumentParser(prog="flotilla debug", description="Says why a cluster hangs.")
    kinds = parser.add_subparsers(dest="what", required=True, metavar="stacks")
    add = kinds.add_parser("stacks", help="what every process is doing, equal stacks together, and who waits for whom").add_argument
    add("stack", help="whose cluster is up")
    add("--all", action="store_true", help="also Ray's own processes, the node agents, and the stacks of idle workers")
    add("--node", help="of this node alone: its rank on a local cluster, else its address")
    options: Any = parser.parse_args(arguments)
    stack = load(options.stack, root)
    return show_stacks(stack, root, options)


def show_stacks(stack: Stack, root: Path, options: Any) -> int:
    begin = time.monotonic()
    found = processes(stack, root)
    if options.node is not None:
        known = sorted({process.node for process in found})
        found = [process for process in found if process.node == options.node]
        if not found:
            raise CommandError(f"--node {options.node}: the cluster {stack.name} has no such node; it has {', '.join(known)}")
    for line in stacks.shown(found, options.all):
        print(line)
    print(f"\nread in {time.monotonic() - begin:.1f} s", file=sys.stderr)
    return 0


def processes(stack: Stack, root: Path) -> list[stacks.Process]:
    """Of all nodes. Raises CommandError where there is no cluster, DebugError where it cannot be seen."""
    if not place_of(stack).remote:
        from cluster_tasks.local.plan import node_addresses, read_task
        from cluster_tasks.local.state import Cluster

        place = folder(stack.name, root).resolve()
        cluster = Cluster.running(place)
        if cluster is None:
            raise CommandError(f"the cluster {stack.name} is not up; first: flotilla up {stack.name}")
        known = gather.known(dashboard(stack, root))
        addresses = node_addresses(read_task(place / "ray-cluster.dstack.yml"))
        ranks = {address: str(rank) for rank, address in enumerate(addresses)}
        by_rank = {(ranks.get(address, ""), pid): process for (address, pid), process in known.items()}
        return stacks.processes(gather.here(cluster.pid), by_rank)
    asked = dashboard(stack, root)
    try:
        nodes = gather.by_job(asked)
    except OSError as error:
        raise unreachable(asked, stack, error) from None
    for node, said in nodes.items():
        if said.get("error"):
            print(f"node {node} cannot be seen: {said['error']}", file=sys.stderr)
    return stacks.processes(nodes, gather.known(asked))
