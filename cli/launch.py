"""`flotilla launch`: from a stack to a job's exit code in one command."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from cli import clusters, jobs, recipes
from cli.places.protocol import Up
from stacks.load import load
from stacks.places import place_of


def main(verb: str, arguments: list[str], root: Path) -> int:
    """`flotilla launch`: with --recipe on any stack, with a command where dstack starts the cluster."""
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    flags = arguments[:cut]
    if not any(flag.partition("=")[0] == "--recipe" for flag in flags):
        from cluster_tasks.client.launch import main as on_dstack

        here = Path.cwd()
        os.chdir(root)  # where `python -m ...` is typed
        return on_dstack(arguments, prog=f"flotilla {verb}", here=here)
    parser = argparse.ArgumentParser(
        prog=f"flotilla {verb}",
        usage="%(prog)s STACK --recipe NAME [flags] [key=value ...]",
        description="Starts the stack's cluster where it is not up, and runs a recipe on it; ends with the trainer's exit code.",
    )
    add = parser.add_argument
    add("stack", help="such as local, onprem, slurm or aws-dev")
    add("settings", nargs="*", metavar="key=value", help=recipes.SETTINGS)
    add("--recipe", required=True, help="such as verl/ppo-gsm8k; flotilla recipe list shows all")
    add("--name", help="of the job; run and time when left out")
    add("--port", help="of the dashboard on this machine")
    add("--timeout", type=float, help="seconds until all nodes are there")
    options: Any = parser.parse_intermixed_args(flags)
    run = recipes.planned(options.stack, options.recipe, options.settings, arguments[cut + 1 :], root)
    stack, at = load(options.stack, root), Up(options.port, options.timeout)
    if place_of(stack).start is None:
        from cluster_tasks.client.launch import SECONDS, launch

        os.chdir(root)
        return launch(stack, recipes.job(run, options.name, root), at.port_number(), options.timeout or SECONDS)
    code = clusters.up(stack, root, at)
    return code or jobs.run_job(stack, recipes.job(run, options.name, root), root)
