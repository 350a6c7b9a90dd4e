"""`flotilla recipe`: other people's trainers, listed and shown; the job that --recipe stands for."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from cli.project import CommandError, console
from cluster_tasks.client.submit import Job
from cluster_tasks.recipes import find, recipes
from cluster_tasks.recipes.as_file import as_file
from cluster_tasks.recipes.planned import COMMAND, OWN, Planned, plan, write
from cluster_tasks.recipes.recipe import Recipe
from stacks.host import command_line
from stacks.load import load

KEYS = "; ".join(f"{key}: {about}" for key, about in OWN.items())
SETTINGS = f"trainer settings, which override the recipe's, and {KEYS}"

LIST = ("flotilla recipe list", "flotilla recipe list --json")
SHOW = ("flotilla recipe show verl/ppo-gsm8k onprem", "flotilla recipe show trl/sft onprem --as dstack run=first")


def main(verb: str, arguments: list[str], root: Path) -> int:
    """`flotilla recipe list`, `flotilla recipe show NAME [STACK] [--as dstack|sbatch] [key=value ...]`."""
    parser = command_line.parser(prog := f"flotilla {verb}", "List other trainers' recipes, or show what one runs.", (*LIST, *SHOW))
    commands = parser.add_subparsers(dest="command", required=True, metavar="list|show", prog=prog)
    about = "List all recipes with the GPUs they need at least, and their model."
    lists = commands.add_parser("list", help="all recipes, their GPUs and models", **command_line.settings(about, LIST))
    lists.add_argument("--json", action="store_true", help="print one JSON list")
    about = "Print every command that a recipe runs on a stack. Starts nothing."
    use = "NAME [STACK] [--as dstack|sbatch] [key=value ...]"
    show = commands.add_parser("show", help="commands that a recipe runs on a stack", **command_line.settings(about, SHOW, use))
    show.add_argument("recipe", metavar="NAME", help="recipe, e.g. verl/ppo-gsm8k")
    command_line.add_stack(show, "; default: Slurm, two nodes with 8 GPUs each", nargs="?")
    show.add_argument("settings", nargs="*", metavar="key=value", help=SETTINGS)
    about = "write and print one file with a cluster and this run, below build/STACK/"
    show.add_argument("--as", dest="kind", choices=("dstack", "sbatch"), help=about)
    if arguments[:1] != ["show"]:
        listed(parser.parse_args(arguments).json)
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


def listed(as_json: bool) -> None:
    """Every recipe, in columns or as JSON."""
    found = list(recipes().values())
    if as_json:
        keys = ("name", "title", "nodes", "gpus", "model", "guide")
        known = [{key: getattr(each, key) for key in keys} for each in found]
        print(json.dumps(known, indent=2))
        return
    table = [("RECIPE", "GPUS", "MODEL", "RUNS"), *((each.name, _gpus(each), each.model, each.title) for each in found)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _gpus(recipe: Recipe) -> str:
    """The least that it runs on."""
    return f"{recipe.nodes} x {recipe.gpus}" if recipe.nodes > 1 else str(recipe.gpus)


def planned(stack: str, name: str, words: list[str], command: list[str], root: Path) -> Planned:
    """Raises UserError, before anything is created."""
    if command:
        raise CommandError(f"--recipe {name} brings its own command; remove what follows --: {' '.join(command)}")
    return plan(load(stack, root), find(name), words, root)


def job(run: Planned, name: str | None, root: Path) -> Job:
    """The Ray job, its files written; called after the run and the time where it has no name. Raises RecipeError."""
    folder, file = write(run, root)
    console.print(f"{run.recipe.name}: {folder.relative_to(root)}/run.json; it saves below {run.place.checkpoints}", markup=False)
    return Job(name or f"{run.place.run}-{time.strftime('%Y%m%d-%H%M%S')}", list(COMMAND), folder, file)
