"""`flotilla top`: what a cluster is doing and what that costs, refreshed until Ctrl-C. Through the dashboard's port alone."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cli.dashboard import dashboard, unreachable
from cli.jobs import LOST
from cli.project import CommandError
from cluster_tasks.client.usage import Node, Usage, look, price_of
from cluster_tasks.node.dashboard import Dashboard
from stacks.host import command_line
from stacks.load import load
from stacks.schema import Stack

PATIENCE = 5  # times in a row that the dashboard may not answer
GIB = 2**30


def main(verb: str, arguments: list[str], root: Path) -> int:
    parser = command_line.parser(
        "flotilla top",
        "Show nodes, GPUs, jobs, the trainer's step, reward, tokens per second and cost,\nrefreshed until Ctrl-C.",
        ("flotilla top local", "flotilla top onprem --every 10", "flotilla top onprem --json"),
    )
    add = parser.add_argument
    command_line.add_stack(parser)
    add("--every", type=float, default=2.0, metavar="SECONDS", help="refresh interval (2)")
    add("--once", action="store_true", help="print one screen and exit; the default without a terminal")
    add("--json", action="store_true", help="print one JSON object and exit")
    options: Any = parser.parse_args(arguments)
    if not 0.5 <= options.every <= 3600:
        parser.error(f"--every {options.every:g} is not from 0.5 to 3600 seconds")
    stack = load(options.stack, root)
    asked = dashboard(stack, root)
    first = seen(asked, stack, None)
    price = price_of(stack)
    if options.json:
        found = seen(asked, stack, price)
        print(json.dumps(asdict(found) | {"gpu_idle_share": found.idle, "cost_usd": found.cost}, indent=2))
        return 0
    console = Console(emoji=False, highlight=False)
    if options.once or not console.is_terminal:
        wide = Console(emoji=False, highlight=False, width=max(console.width, 120), soft_wrap=True)
        wide.print(screen(seen(asked, stack, price), stack))
        return 0
    return refresh(asked, stack, price, first, options.every, console)


def seen(asked: Dashboard, stack: Stack, price: float | None) -> Usage:
    """Raises CommandError where the cluster is not up."""
    try:
        return look(asked, time.time(), price)
    except OSError as error:
        raise unreachable(asked, stack, error) from None


def refresh(asked: Dashboard, stack: Stack, price: float | None, first: Usage, every: float, console: Console) -> int:
    """Until Ctrl-C. Raises CommandError where the cluster has ended."""
    missed = 0
    with Live(screen(first, stack), console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                try:
                    live.update(screen(look(asked, time.time(), price), stack), refresh=True)
                    missed = 0
                except OSError as error:
                    missed += 1
                    if missed == PATIENCE:
                        raise CommandError(f"{asked.url} does not answer any more ({error}); flotilla status {stack.name}", LOST) from None
                time.sleep(every)
        except KeyboardInterrupt:
            return 0


def screen(usage: Usage, stack: Stack) -> Group:
    """What is shown at once."""
    head = Text(f"{stack.name}  {len(usage.nodes)} nodes  up {usage.up:.1f} h  {time.strftime('%H:%M:%S')}")
    nodes = Table("node", "CPUs", "use", "memory GiB", "GPUs", "use", "GPU memory GiB", box=None, pad_edge=False)
    for node in usage.nodes:
        nodes.add_row(*_cells(node))
    jobs = Table("job", "state", "hours", "step", "reward", "tokens/s", "s/step", "command", box=None, pad_edge=False)
    for job in usage.jobs:
        known = job.progress
        numbers = (known.reward, known.tokens_per_second, known.seconds) if known else (None, None, None)
        step = f"{known.step}/{known.steps}" if known else ""
        values = ["" if value is None else f"{value:,.4g}" if value < 1000 else f"{value:,.0f}" for value in numbers]
        jobs.add_row(job.name, job.status, f"{job.hours:.1f}", step, *values, Text(job.command, overflow="ellipsis", no_wrap=True))
    return Group(head, Text(), nodes, Text(), jobs if usage.jobs else Text("no jobs"), Text(), *map(Text, usage.lines()))


def _cells(node: Node) -> list[str]:
    """GPUs in one cell each of the node's row, so that eight nodes fit on a screen."""
    use = " ".join("?" if gpu.percent is None else f"{gpu.percent:.0f}%" for gpu in node.gpus)
    memory = " ".join(f"{gpu.used / GIB:.0f}/{gpu.total / GIB:.0f}" for gpu in node.gpus)
    kinds = ", ".join(sorted({gpu.name for gpu in node.gpus}))
    gpus = f"{len(node.gpus)} {kinds}" if node.gpus else "0"
    return [node.address, f"{node.cpus:g}", f"{node.percent:.0f}%", f"{node.used / GIB:.1f}/{node.total / GIB:.1f}", gpus, use, memory]
