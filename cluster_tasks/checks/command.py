"""Is this cluster fit for a job? One table, a row per node, and below it the errors, each with its fix.

    ray job submit --working-dir . -- python -m cluster_tasks.checks             on a Ray cluster
    srun --ntasks-per-node=1 python -m cluster_tasks.checks                       on a Slurm allocation, without Ray
    python -m cluster_tasks.checks --rank 0 --addresses 10.0.0.1,10.0.0.2         by hand, once on every node
    python -m cluster_tasks.checks --here                                         this machine alone

Exit codes: 0 where there is no error, 1 where there is one, 2 for a mistake on the command line or a node that did not answer.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from ipaddress import ip_network
from typing import Any

from rich.console import Console
from rich.table import Table

from cluster_tasks.checks.collective import Group, GroupError, OneNode, RayNodes, StoreNodes
from cluster_tasks.checks.links import Speed
from cluster_tasks.checks.rules import CheckError, Expected, Measured, check_errors
from cluster_tasks.node.network import ALONE
from cluster_tasks.node.ray import NODE_GPUS
from cluster_tasks.node.settings import Settings, counts, who_am_i
from stacks.host import command_line

SPEED_LIMIT = 120  # seconds for the bandwidth test, the start of torch included


def measure(group: Group, addresses: list[str], seconds: float) -> Measured:
    """Takes all nodes through the steps of a Probe, in step. Bandwidth is left out where `seconds` is 0 or nodes do not reach others."""
    facts = group.call("facts")
    ports = group.call("serve_clock")
    reach = group.call("reach", [list(pair) for pair in zip(addresses, ports, strict=True)])
    marker = str(group.call("free_port")[0])  # any word that all know
    group.call("leave_marker", marker)
    markers = group.call("markers", marker)
    group.call("remove_markers", marker)
    speed: list[Speed] = []
    if seconds and not any(peer.error for row in reach for peer in row):
        gpus = [len(node.gpus) if node.offered is None else node.offered for node in facts]
        lead = next((rank for rank, count in enumerate(gpus) if count), 0)  # the first that takes part
        port = group.call("free_port")[lead]
        speed = group.call("speed", addresses[lead], port, gpus, seconds, SPEED_LIMIT)
    return Measured(facts, reach, markers, speed)


def table(found: Measured, errors: list[CheckError]) -> Table:
    """A row per node."""
    shown = Table("node", "address", "host", "state", "CPUs", "GPUs", "driver", "torch", "Ray", "shm", "free", "clock", "reach", "GB/s")
    for index, node in enumerate(found.facts):
        of_node = [error for error in errors if error.node == node.rank]
        bad = sum(error.hard for error in of_node)
        state = f"[red]{bad} error{'s' * (bad > 1)}[/]" if bad else f"[yellow]{len(of_node)} noted[/]" if of_node else "ok"
        row = found.reach[index] if found.reach else []
        speed = found.speed[index] if found.speed else None
        rate = f"{speed.all_reduce:.3g} / {speed.point_to_point:.3g}" if speed and speed.all_reduce and speed.point_to_point else "-"
        models = dict.fromkeys(node.gpus)
        shown.add_row(
            str(node.rank),
            node.address,
            node.host,
            state,
            str(node.cpus),
            ", ".join(f"{node.gpus.count(model)} x {model}" for model in models) or str(node.offered or 0),
            node.versions.get("driver", "-"),
            node.versions.get("torch", "-"),
            node.versions.get("ray", "-"),
            f"{node.shm:.0f} GB",
            f"{min(disk.free for disk in node.disks):.0f} GB",
            f"{found.reach[0][index].skew * 1000:+.0f} ms" if found.reach else "-",
            f"{sum(not peer.error for peer in row)} of {len(row)}",
            rate,
        )
    return shown


def show(console: Console, found: Measured, errors: list[CheckError], seconds: float) -> None:
    console.print(table(found, errors))
    for error in errors:
        kind, whose = ("ERROR" if error.hard else "note "), "" if error.node is None else f"node {error.node}: "
        console.print(f"{kind} {whose}{error.text}\n      fix: {error.fix}", markup=False, highlight=False, soft_wrap=True)
    bad = sum(error.hard for error in errors)
    means = {"cuda": "NCCL or RCCL between GPUs", "cpu": "gloo between CPUs"}
    device = means[found.speed[0].device] if found.speed else "not measured"
    bandwidth = f"GB/s (all-reduce / to the next node): {device}"
    console.print(
        f"{len(found.facts)} node{'s' * (len(found.facts) != 1)}, {bad} errors, {len(errors) - bad} notes, {seconds:.1f} s; {bandwidth}",
        soft_wrap=True,
    )


def as_json(found: Measured, errors: list[CheckError], seconds: float) -> str:
    ok = not any(error.hard for error in errors)
    return json.dumps({"ok": ok, "seconds": seconds, "errors": [dataclasses.asdict(error) for error in errors]} | dataclasses.asdict(found))


def scheduled(options: Any) -> tuple[int, list[str], int | None] | None:
    """Rank, addresses and GPUs per node as flags, dstack or Slurm say; None where nobody does. Raises ValueError, OSError."""
    if options.rank is None and not any(name in os.environ for name in ("DSTACK_NODE_RANK", "SLURM_JOB_NODELIST")):
        return None
    settings = Settings(rank=options.rank, addresses=options.addresses, network=options.network)
    return who_am_i(settings, os.environ)


def group_of(options: Any, known: tuple[int, list[str], int | None] | None) -> tuple[Group, list[str]]:
    """The nodes to look at, and their addresses in order of rank."""
    ray_address = os.environ.get("RAY_ADDRESS", "")
    if options.here:
        return OneNode(), [ALONE]
    if options.rank is None and ray_address:
        if ray_address.startswith("http"):
            raise ValueError(
                f"RAY_ADDRESS={ray_address}: submit it there: ray job submit --working-dir . -- python -m cluster_tasks.checks"
            )
        nodes = RayNodes(known[1] if known else [])
        return nodes, nodes.addresses
    if known is None:
        return OneNode(), [ALONE]
    rank, addresses, _ = known
    return (StoreNodes(rank, addresses, options.port, options.wait) if len(addresses) > 1 else OneNode(addresses[0])), addresses


def main(argv: list[str] | None = None, prog: str = "python -m cluster_tasks.checks") -> int:
    options: Any = _parser(prog).parse_args(argv)
    start = time.monotonic()
    try:
        known = None if options.here else scheduled(options)
        group, addresses = group_of(options, known)
        found = measure(group, addresses, 0 if options.quick else options.seconds)
        group.close()
    except (ValueError, OSError, subprocess.SubprocessError, GroupError) as error:
        print(f"checks: {error}", file=sys.stderr)
        return 2
    expected = Expected(
        addresses=tuple(known[1]) if known else None,
        nodes=options.nodes,
        gpus=options.gpus or _expected_gpus(known),
        free=options.free,
        floor=options.floor,
    )
    errors = check_errors(expected, found)
    if group.rank == 0:
        seconds = time.monotonic() - start
        if options.json:
            print(as_json(found, errors, seconds))
        else:
            show(Console(emoji=False, width=None if sys.stdout.isatty() else 180), found, errors, seconds)
    return 1 if any(error.hard for error in errors) else 0


def _expected_gpus(known: tuple[int, list[str], int | None] | None) -> list[int] | None:
    """GPUs that nodes should have: of each, as the agent tells jobs where nodes are not alike, else as the scheduler says of this one."""
    if known is None:
        return None
    if of_each := os.environ.get(NODE_GPUS):
        return counts(of_each)
    return None if known[2] is None else [known[2]]


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = command_line.parser(
        prog,
        "Check whether a cluster's nodes, GPUs, folders and links are fit for a job.",
        ("flotilla check --here", "flotilla check --here --quick --json"),
        usage="[--here] [flags]",
        more="To check a running cluster, submit the check as a job:\n  flotilla submit onprem -- python -m cluster_tasks.checks",
    )
    add, floor = parser.add_argument, os.environ.get("FLOTILLA_BANDWIDTH_FLOOR")
    add("--here", action="store_true", help="check only this machine")
    add("--rank", type=int, help="rank of this node, with --addresses")
    add("--addresses", type=lambda text: text.split(","), help="addresses of all nodes by rank, comma-separated")
    add("--network", type=ip_network, metavar="CIDR", help="network of the nodes' addresses, under Slurm")
    add("--port", type=int, default=29431, help="rendezvous port without Ray (29431)")
    add("--wait", type=float, default=120, metavar="SECONDS", help="rendezvous timeout without Ray (120)")
    add("--nodes", type=int, help="expected nodes (default: the scheduler's)")
    add("--gpus", type=counts, help="expected GPUs: 8, or 0,8,8 by rank (the scheduler's)")
    add("--free", type=float, default=10, metavar="GB", help="free disk for checkpoints, cache and /tmp (10)")
    add("--floor", type=float, metavar="GB/S", default=float(floor) if floor else None, help="least all-reduce bandwidth (the fabric's)")
    add("--seconds", type=float, default=2, help="length of each bandwidth test (2)")
    add("--quick", action="store_true", help="skip the bandwidth tests")
    add("--json", action="store_true", help="print one JSON line")
    return parser
