"""`flotilla launch`: from a stack to a job's exit code in one command."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from cli import clusters, jobs, recipes
from cli.places.protocol import Up
from stacks.host import command_line
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
    parser = command_line.parser(
        f"flotilla {verb}",
        "Start the stack's cluster if it is not up, run a recipe on it, and exit with the\ntrainer's exit code.",
        ("flotilla launch onprem --recipe verl/ppo-gsm8k", "flotilla launch slurm --recipe trl/sft run=first"),
        usage="STACK --recipe NAME [flags] [key=value ...]",
    )
    add = parser.add_argument
    command_line.add_stack(parser)
    add("settings", nargs="*", metavar="key=value", help=recipes.SETTINGS)
    add("--recipe", required=True, metavar="NAME", help="recipe, e.g. verl/ppo-gsm8k (flotilla recipe list)")
    add("--name", help="job name (default: RUN-TIME)")
    add("--port", help="dashboard port on this machine")
    add("--timeout", type=float, help="seconds to wait for all nodes")
    options: Any = parser.parse_intermixed_args(flags)
    run = recipes.planned(options.stack, options.recipe, options.settings, arguments[cut + 1 :], root)
    stack, at = load(options.stack, root), Up(options.port, options.timeout)
    if place_of(stack).start is None:
        from cluster_tasks.client.launch import SECONDS, launch

        os.chdir(root)
        return launch(stack, recipes.job(run, options.name, root), at.port_number(), options.timeout or SECONDS)
    code = clusters.up(stack, root, at)
    return code or jobs.run_job(stack, recipes.job(run, options.name, root), root)
