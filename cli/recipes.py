"""`flotilla recipe`: other people's trainers, listed and shown; the job that --recipe stands for."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from cli.project import CommandError, console
from cluster_tasks.client.submit import Job
from cluster_tasks.recipes import find, recipes
from cluster_tasks.recipes.as_file import as_file
from cluster_tasks.recipes.planned import COMMAND, OWN, Planned, plan, write
from stacks.host.project import STACK_HELP
from stacks.load import load

KEYS = "; ".join(f"{key}: {about}" for key, about in OWN.items())
SETTINGS = f"settings of the trainer as key=value, which replace the recipe's; and of ours: {KEYS}"


def main(verb: str, arguments: list[str], root: Path) -> int:
    """`flotilla recipe list`, `flotilla recipe show NAME [STACK] [--as dstack|sbatch] [key=value ...]`."""
    parser = argparse.ArgumentParser(prog=f"flotilla {verb}", description="Other people's trainers on a stack's cluster.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="list|show")
    commands.add_parser("list", help="all recipes")
    show = commands.add_parser("show", help="what a recipe runs on a stack, each command to be copied; as a file, --as")
    show.add_argument("recipe", help="such as verl/ppo-gsm8k")
    show.add_argument("stack", nargs="?", help=f"{STACK_HELP}; default: a Slurm cluster of two nodes with 8 GPUs each")
    show.add_argument("settings", nargs="*", metavar="key=value", help=SETTINGS)
    about = "a file for dstack apply or sbatch: a cluster of its own, and the run on it; written below build/STACK/ and printed"
    show.add_argument("--as", dest="kind", choices=("dstack", "sbatch"), help=about)
    if arguments[:1] != ["show"]:
        parser.parse_args(arguments)  # which ends with --help and mistakes
        for recipe in recipes().values():
            print(f"{recipe.name:<32} {recipe.title}")
        return 0
    options: Any = show.parse_intermixed_args(arguments[1:])
    words = [*options.settings]
    if options.stack and "=" in options.stack:
        words, options.stack = [options.stack, *words], None
    if options.kind and not options.stack:
        show.error(f"--as {options.kind} needs a STACK")
    stack = load(options.stack or "slurm", root)
    run = plan(stack, find(options.recipe), words, root)
    if not options.kind:
        print(run.shown())
        return 0
    file, submit = as_file(options.kind, run, stack, root)
    print(file.read_text(), end="")
    console.print(f"wrote {file.relative_to(root)}; in the project's folder: {submit}", markup=False)
    return 0


def planned(stack: str, name: str, words: list[str], command: list[str], root: Path) -> Planned:
    """Raises UserError, before anything is created."""
    if command:
        raise CommandError(f"--recipe {name} brings its own command; leave out what stands behind --: {' '.join(command)}")
    return plan(load(stack, root), find(name), words, root)


def job(run: Planned, name: str | None, root: Path) -> Job:
    """The Ray job, its files written; called after the run and the time where it has no name. Raises RecipeError."""
    folder, file = write(run, root)
    console.print(f"{run.recipe.name}: {folder.relative_to(root)}/run.json; it saves below {run.place.checkpoints}", markup=False)
    return Job(name or f"{run.place.run}-{time.strftime('%Y%m%d-%H%M%S')}", list(COMMAND), folder, file)
