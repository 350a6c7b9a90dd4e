"""`flotilla submit --queue` and `flotilla queue`: jobs that share a cluster."""

from __future__ import annotations

import argparse
import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from cli.dashboard import address, dashboard
from cli.plan import of_stack
from cli.project import CommandError, environment
from cluster_tasks.client.job_queue import Queue, estimated, needs
from cluster_tasks.client.submit import Job, owner, say
from stacks.host import command_line
from stacks.load import load
from stacks.schema import Stack

ACTIONS = ("list", "why", "hold", "release", "cancel", "move", "owner")
UNITS = {"m": 60.0, "h": 3600.0, "d": 86400.0}
OURS = ("priority", "owner", "deadline", "budget", "gpu_hours", "gpus", "cpus", "floor", "ceiling")  # flags of submit


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Those of `flotilla submit` that are for the queue."""
    add = parser.add_argument
    add("--queue", action="store_true", help="put the job into the cluster's queue and return")
    add("--priority", type=int, metavar="N", help="queue: from 0 to 100 (50)")
    add("--owner", metavar="NAME", help="queue: whose share it counts for (your user name)")
    add("--deadline", type=seconds, metavar="TIME", help="queue: when it should be done, from now: 90m, 8h, 2d")
    add("--budget", type=float, metavar="USD", help="queue: pause the job before it costs more")
    add("--gpu-hours", type=float, metavar="H", help="queue: pause the job before it takes more")
    add("--gpus", type=float, metavar="N", help="queue: GPUs that the job takes (a trainer's settings say it)")
    add("--cpus", type=float, metavar="N", help="queue: the same of CPUs")
    add("--floor", type=int, metavar="RANKS", help="queue: fewest ranks that the run may be given")
    add("--ceiling", type=int, metavar="RANKS", help="queue: most ranks")


def seconds(text: str) -> float:
    """Of `90m`, `8h` or `2d`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([mhd])", text)
    if not found or not float(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 90m, 8h or 2d")
    return float(found[1]) * UNITS[found[2]]


def submit(stack: Stack, job: Job, options: Any, root: Path) -> int:
    """Raises UserError."""
    given = {"priority": options.priority, "deadline": options.deadline, "budget_usd": options.budget}
    given |= {"budget_gpu_hours": options.gpu_hours, "owner": options.owner or owner()["owner"], "stack": stack.name}
    own = {key: value for key, value in given.items() if value is not None}
    own |= needs(job, options.gpus, options.cpus, options.floor, options.ceiling)
    with suppress(CommandError):  # a stack of which nobody plans anything: without GPUs, or of several kinds
        own |= estimated(job, of_stack(stack, root))
    queue, source = Queue(dashboard(stack, root)), f"build/{stack.name}"
    queue.submit(source, job, own, os.environ | environment(stack.name, root))
    say(f"{job.name} is in the queue\n  look  flotilla queue {stack.name}\n  why   flotilla queue {stack.name} why {job.name}")
    return 0


def main(verb: str, arguments: list[str], root: Path) -> int:
    parser = command_line.parser(
        "flotilla queue",
        "Show the jobs that share the stack's cluster, or change one.\nflotilla submit STACK --queue puts a job there.",
        (
            "flotilla queue onprem",
            "flotilla queue onprem why ppo-1",
            "flotilla queue onprem hold ppo-1",
            "flotilla queue onprem release ppo-1 --budget 200",
            "flotilla queue onprem move ppo-1 --priority 80",
            "flotilla queue onprem owner alice --weight 2 --quota 16",
            "flotilla queue onprem --plan",
        ),
        usage="STACK [list] [flags]\nSTACK why|hold|release|cancel|move JOB [flags]\nSTACK owner NAME [flags]",
    )
    add = parser.add_argument
    command_line.add_stack(parser)
    add("action", nargs="?", default="list", metavar="ACTION", help=f"{', '.join(ACTIONS)} (list)")
    add("name", nargs="?", metavar="JOB", help="job, or owner")
    add("--plan", action="store_true", help="when each job will start and end, and its cost from now")
    add("--all", action="store_true", help="list jobs too that succeeded or were cancelled")
    add("--json", action="store_true", help="print one JSON object")
    add("--priority", type=int, metavar="N", help="move: from 0 to 100")
    add("--budget", type=float, metavar="USD", help="release: new budget")
    add("--gpu-hours", type=float, metavar="H", help="release: new budget")
    add("--weight", type=float, metavar="W", help="owner: share against other owners (1)")
    add("--quota", type=float, metavar="GPUS", help="owner: GPUs at once; 0 for no limit")
    options: Any = parser.parse_intermixed_args(arguments)
    if options.action not in ACTIONS:
        parser.error(f"{options.action!r} is not an action; there are {', '.join(ACTIONS)}")
    if (options.name is None) != (options.action == "list"):
        parser.error(f"{options.action} takes {'no JOB' if options.action == 'list' else 'JOB' if options.action != 'owner' else 'NAME'}")
    takes = {"move": ("priority",), "release": ("budget", "gpu_hours"), "owner": ("weight", "quota"), "list": ("plan", "all")}
    for flag in ("priority", "budget", "gpu_hours", "weight", "quota", "plan", "all"):
        if getattr(options, flag) not in (None, False) and flag not in takes.get(options.action, ()):
            parser.error(f"--{flag.replace('_', '-')} is not for {options.action}")
    if options.action == "move" and options.priority is None:
        parser.error("move takes --priority N")
    stack = load(options.stack, root)
    queue = Queue(dashboard(stack, root))
    try:
        return act(queue, stack, options)
    except OSError as error:
        raise CommandError(
            f"{address(stack, root)} does not answer ({getattr(error, 'reason', error)}); first: flotilla up {stack.name}"
        ) from None


def act(queue: Queue, stack: Stack, options: Any) -> int:
    """Raises QueueError, OSError."""
    if options.action == "list":
        found, planned = queue.all(), queue.plan() if options.plan else None
        if options.json:
            print(json.dumps(found | ({"plan": planned} if planned else {}), indent=2))
        else:
            show(found, planned, options.all)
        return 0
    if options.action == "owner":
        changes = {"weight": options.weight, "quota": options.quota or None} if options.quota is not None else {"weight": options.weight}
        found = queue.owner(options.name, **{key: value for key, value in changes.items() if value is not None or key == "quota"})
        quota = "no quota" if found["quota"] is None else f"a quota of {found['quota']:g} GPUs"
        line = f"{options.name}: weight {found['weight']:g}, {quota}"
    elif options.action == "why":
        found = queue.job(options.name)
        line = "\n".join(why(found))
    else:
        more = {"priority": options.priority} if options.action == "move" else {}
        if options.action == "release":
            given = {"budget_usd": options.budget, "budget_gpu_hours": options.gpu_hours}
            more = {key: value for key, value in given.items() if value is not None}
        found = queue.do(options.name, options.action, **more)
        then = f", then {found['after']}" if found["state"] == "pausing" else ""
        line = f"{options.name} is {found['state']}{then}: {found['reason']}"
    print(json.dumps(found, indent=2) if options.json else line)
    return 0


def show(found: dict[str, Any], planned: dict[str, Any] | None, ended: bool) -> None:
    """One line for each job, then the cluster and its owners."""
    console, cluster = Console(emoji=False, highlight=False, soft_wrap=True, markup=False), found["cluster"]
    shown = [job for job in found["jobs"] if ended or job["state"] not in ("succeeded", "cancelled")]
    priced = cluster["hourly"] is not None
    columns = ["job", "state", "priority", "owner", "takes", "step", "ran", *(["USD"] if priced else [])]
    columns += ["starts in", "ends in", *(["USD from now"] if priced else [])] if planned else ["reason"]
    table = [columns]
    for job in shown:
        step = f"{job['step']}/{job['steps']}" if job["step"] is not None else ""
        row = [
            job["name"],
            job["state"],
            str(job["priority"]),
            job["job"]["owner"],
            taken(job),
            step,
            ago(job["spent"].get("running", 0.0)),
        ]
        row += [f"{job['usd']:.2f}"] if priced else []
        if planned:
            times = planned["jobs"].get(job["name"], {"start": None, "end": None, "usd": None})
            row += ["?" if times[key] is None else ago(times[key]) for key in ("start", "end")]
            row += [("?" if times["usd"] is None else f"{times['usd']:.2f}")] if priced else []
        else:
            row.append(job["reason"])
        table.append(row)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table if shown else [["no jobs in the queue"]]:
        console.print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip())
    if cluster["trouble"]:
        console.print(cluster["trouble"])
    if "gpus" in cluster:
        kind = "gpus" if cluster["gpus"] else "cpus"
        used = sum(job["size"][kind] for job in found["jobs"] if job["state"] in ("running", "pausing"))
        by_hand = f", {cluster[f'other_{kind}']:g} by jobs submitted by hand" if cluster[f"other_{kind}"] else ""
        console.print(f"{used:g} of {cluster[kind]:g} {kind.upper()[:-1]}s taken by the queue{by_hand}")
    for name, each in found["owners"].items():
        if each["weight"] != 1 or each["quota"] is not None:
            quota = "" if each["quota"] is None else f", quota {each['quota']:g} GPUs"
            console.print(f"owner {name}: weight {each['weight']:g}{quota}")


def taken(job: dict[str, Any]) -> str:
    """What a job has, or wants; with its floor where that is less."""
    sizes, size = job["job"]["sizes"], job["size"] or job["job"]["sizes"][0]
    kind = "gpus" if sizes[0]["gpus"] else "cpus"
    least = f" ({sizes[-1][kind]:g}-{sizes[0][kind]:g})" if len(sizes) > 1 else ""
    return f"{size[kind]:g} {kind.upper()[:-1]}s{least}"


def why(job: dict[str, Any]) -> list[str]:
    """Its state, what it has cost, and every decision on it."""
    spent = ", ".join(f"{state} {ago(seconds)}" for state, seconds in job["spent"].items() if seconds >= 1)
    gpus = sum(job["gpu_seconds"].values()) / 3600
    lines = [f"{job['name']} is {job['state']}: {job['reason']}"]
    lines += [f"time: {spent}; {gpus:.2f} GPU hours, {job['usd']:.2f} USD, paused {job['pauses']} times"] if spent else []
    lines += [f"{each['at']}  {each['action']:<9}  {each['reason']}" for each in job["decisions"]]
    return lines


def ago(seconds: float) -> str:
    """A duration in at most two units."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
