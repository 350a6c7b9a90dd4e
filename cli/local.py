"""A stack of this machine's own processes: `python -m cluster_tasks.local`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from cli.dashboard import dashboard, show_engines, show_jobs
from cli.project import show
from cluster_tasks.local.commands import main
from stacks.schema import Fleet, Stack


def up(stack: Stack, root: Path, options: Any) -> int:
    port = ["--port", options.port] if options.port else []
    timeout = ["--timeout", f"{options.timeout:g}"] if options.timeout else []
    return _command(stack, root, "up", *port, *timeout)


def down(stack: Stack, root: Path, options: Any) -> int:
    return _command(stack, root, "down")


def status(stack: Stack, root: Path, options: Any) -> int:
    code = _command(stack, root, "status", *(["--json"] if options.json else []), shown=False)
    if code == 0 and not options.json:
        asked = dashboard(stack, root)
        price = f"  {stack.monitoring.price:,.2f} USD/h" if stack.monitoring.price else ""
        for address, fleet in asked.elastic_nodes().items():
            print(f"elastic {fleet}  {address}  ALIVE{price}")
        show_engines(root / "build" / stack.name / "runs")
        show_jobs(asked, stack)
    return code


def scale(stack: Stack, root: Path, counts: list[tuple[Fleet, int]]) -> int:
    changes = [f"{fleet.name}={count}" for fleet, count in counts]
    os.chdir(root)
    words = ["scale", *changes, "--file", f"build/{stack.name}/ray-cluster.dstack.yml"]
    show(["python", "-m", "cluster_tasks.local", *words])
    return main(words)


def _command(stack: Stack, root: Path, command: str, *flags: str, shown: bool = True) -> int:
    file = f"build/{stack.name}/ray-cluster.dstack.yml"
    os.chdir(root)
    if shown:
        show(["python", "-m", "cluster_tasks.local", command, file, *flags])
    return main([command, file, *flags])
