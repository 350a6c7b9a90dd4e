"""`flotilla up`, `down` and `status`: one place's own way behind each."""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from cli.places import place
from cli.places.protocol import Down, Up
from cli.project import CommandError, console, run
from cluster_tasks.client.render import check_shell, pulumi_is_here, render
from stacks.host.project import STACK_HELP
from stacks.load import load
from stacks.places import place_of
from stacks.schema import Stack

ABOUT = {
    "up": "Renders the stack, starts its cluster, waits until every node is there, and opens the dashboard on this machine.",
    "down": "Stops the stack's cluster, and all that `flotilla up` started for it.",
    "status": "The stack's nodes and jobs. Exit code 0 when all is there, 1 when not.",
}
PULUMI = "https://www.pulumi.com/docs/install/"


def main(verb: str, arguments: list[str], root: Path) -> int:
    parser = argparse.ArgumentParser(prog=f"flotilla {verb}", description=ABOUT[verb])
    add = parser.add_argument
    add("stack", help=STACK_HELP)
    if verb == "up":
        add("--port", help="of the dashboard on this machine; for local also auto, the next free one")
        add("--timeout", type=float, help="seconds until all nodes are there (local 120, else 1800)")
    if verb in ("up", "down"):
        add("-y", "--yes", action="store_true", help="do not ask before something is created or destroyed")
    if verb == "down":
        add("--job", help="stop this job alone; it saves first, and the cluster stays up")
        add("--keep-machines", action="store_true", help="stop the cluster; leave dstack's fleets and the cloud's resources")
    if verb == "status":
        add("--json", action="store_true")
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
