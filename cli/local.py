"""A stack of this machine's own processes: `python -m cluster_tasks.local`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from cli.dashboard import dashboard, show_jobs
from cli.project import show
from cluster_tasks.client.elastic import NO_ELASTIC, Elastic, joined
from cluster_tasks.local.commands import main, state
from stacks.schema import Fleet, Stack


def up(stack: Stack, root: Path, options: Any) -> int:
    port = ["--port", options.port] if options.port else []
    timeout = ["--timeout", f"{options.timeout:g}"] if options.timeout else []
    return _command(stack, root, "up", *port, *timeout)


def down(stack: Stack, root: Path, options: Any) -> int:
    return _command(stack, root, "down")


def status(stack: Stack, root: Path, options: Any) -> int:
    os.chdir(root)
    file = Path(f"build/{stack.name}/ray-cluster.dstack.yml")
    if options.json:
        known = state(file)
        serving = _elastic(stack, root) if known["up"] else NO_ELASTIC
        print(json.dumps(known | serving.as_json(), indent=2))
        return 0 if known["whole"] and not serving.short else 1
    code = _command(stack, root, "status", shown=False)
    if code == 0:
        serving = _elastic(stack, root)
        for line in serving.lines():
            print(line)
        show_jobs(dashboard(stack, root), stack)
        code = 1 if serving.short else 0
    return code


def _elastic(stack: Stack, root: Path) -> Elastic:
    asked = dashboard(stack, root)
    return Elastic.of(stack, joined(asked, stack), asked)


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
