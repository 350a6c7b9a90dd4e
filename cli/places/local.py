"""A stack of this machine's own processes."""

from __future__ import annotations

import json
import os
from pathlib import Path

from cli.dashboard import dashboard, show_jobs
from cli.places.protocol import Down, Up
from cluster_tasks.client.elastic import NO_ELASTIC, Elastic, joined
from cluster_tasks.local import commands
from stacks.schema import Fleet, Stack


def up(stack: Stack, root: Path, options: Up) -> int:
    return commands.up(_task(stack, root), options.port, options.timeout or commands.SECONDS)


def down(stack: Stack, root: Path, options: Down) -> int:
    return commands.down(_task(stack, root))


def scale(stack: Stack, root: Path, counts: list[tuple[Fleet, int]]) -> int:
    return commands.scale(_task(stack, root), {fleet.name: count for fleet, count in counts})


def status(stack: Stack, root: Path, as_json: bool) -> int:
    file = _task(stack, root)
    known = commands.state(file)
    serving = _elastic(stack, root) if known["up"] else NO_ELASTIC
    if as_json:
        print(json.dumps(known | serving.as_json(), indent=2))
    elif commands.status(file) == 0:
        for line in serving.lines():
            print(line)
        show_jobs(dashboard(stack, root), stack)
    return 0 if known["whole"] and not serving.short else 1


def _task(stack: Stack, root: Path) -> Path:
    """The rendered task as it is named in the project's folder, where this goes. Raises LocalError on other systems than Linux."""
    commands.require_linux()
    os.chdir(root)
    return Path(f"build/{stack.name}/ray-cluster.dstack.yml")


def _elastic(stack: Stack, root: Path) -> Elastic:
    asked = dashboard(stack, root)
    return Elastic.of(stack, joined(asked, stack), asked)
