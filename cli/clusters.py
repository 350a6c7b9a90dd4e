"""`flotilla up`, `down` and `status`: one place's own way behind each."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from cli.places import place
from cli.places.protocol import Down, Up
from cli.project import CommandError, console, run
from cluster_tasks.client.render import check_shell, pulumi_is_here, render
from stacks.host import command_line
from stacks.load import load
from stacks.places import place_of
from stacks.schema import Stack

ABOUT = {
    "up": "Render the stack, start its cluster, wait for every node, and forward its\ndashboard to this machine.",
    "down": "Stop the stack's cluster and everything that `flotilla up` started for it.",
    "status": "Show the stack's nodes and jobs. Exit code 0: all nodes are up. 1: some are not.",
}
EXAMPLES = {
    "up": ("flotilla up local --port auto", "flotilla up onprem --timeout 3600", "flotilla up aws-dev --yes"),
    "down": ("flotilla down local", "flotilla down onprem --job ppo-1", "flotilla down aws-dev --keep-machines"),
    "status": ("flotilla status local", "flotilla status onprem --json"),
}
PULUMI = "https://www.pulumi.com/docs/install/"


def main(verb: str, arguments: list[str], root: Path) -> int:
    parser = command_line.parser(f"flotilla {verb}", ABOUT[verb], EXAMPLES[verb])
    add = parser.add_argument
    command_line.add_stack(parser)
    if verb == "up":
        add("--port", help="dashboard port on this machine; with local also auto, the next free one")
        add("--timeout", type=float, help="seconds to wait for all nodes (local 120, else 1800)")
    if verb in ("up", "down"):
        add("-y", "--yes", action="store_true", help="do not ask before something is created or destroyed")
    if verb == "down":
        add("--job", help="stop only this job: it saves first, and the cluster stays up")
        add("--keep-machines", action="store_true", help="stop the cluster, keep dstack's fleets and cloud resources")
    if verb == "status":
        add("--json", action="store_true", help="print one JSON object")
    options: Any = parser.parse_args(arguments)
    stack = load(options.stack, root)
    if verb == "down" and options.job:
        from cli import jobs

        return jobs.stop(stack, root, options.job)
    if verb == "status":
        return place(stack).status(stack, root, options.json)
    if verb == "down":
        return place(stack).down(stack, root, Down(options.yes, options.keep_machines))
    return up(stack, root, Up(options.port, options.timeout), options.yes)


def up(stack: Stack, root: Path, options: Up, yes: bool = False) -> int:
    """Renders the stack and starts its cluster; `yes`: nobody is asked before something is created. Raises UserError."""
    if place_of(stack).cloud and not pulumi_is_here():
        raise CommandError(
            f"flotilla up {stack.name} makes a network and more in the cloud, for which Pulumi's CLI has to be on PATH: {PULUMI}"
        )
    chosen = place(stack)
    check_shell(stack, os.environ)
    yes = yes or not sys.stdin.isatty()
    render(stack.name, root, partial(_run, root), console.print, local=not place_of(stack).remote, yes=yes)
    return chosen.up(stack, root, options)


def _run(root: Path, command: list[str], env: dict[str, str]) -> None:
    run(command, root, os.environ | env)
