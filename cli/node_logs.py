"""`flotilla logs STACK --node N`: what the agent and the workers of one node print."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from cli.dashboard import dashboard, unreachable
from cli.project import CommandError, environment, folder
from cluster_tasks.debug import collect, gather
from stacks.places import place_of
from stacks.schema import Stack

WORKERS = re.compile(r"(?:^|/)(?:worker-.*\.(?:out|err)|services-[^/]*/[^/]*\.log)$")
NOISE = re.compile(r":(?:job_id|actor_name|task_name):")


def show(stack: Stack, root: Path, node: str) -> int:
    """Prints them, each below its name. Raises CommandError where there is no such node."""
    place = folder(stack.name, root).resolve()
    secrets = collect.known_secrets(stack, place, environment(stack.name, root))
    from_shell = [name for name, value in stack.task.env.items() if value is None]
    if place_of(stack).remote:
        asked = dashboard(stack, root)
        try:
            nodes = gather.logs_by_job(asked, from_shell)
        except OSError as error:
            raise unreachable(asked, stack, error) from None
        agent = ""
    else:
        from cli.debug import local_cluster

        nodes = collect.of_local(stack, place, gather.agents(local_cluster(stack, place).pid), secrets)
        agent = collect.rendered(place, secrets).get(f"logs/node-{node}.log", "")
    if node not in nodes:
        raise CommandError(f"--node {node}: the cluster {stack.name} has no such node; it has {', '.join(sorted(nodes))}")
    for line in lines({"agent": agent} | nodes[node]):
        print(line)
    return 0


def lines(texts: Mapping[str, str]) -> list[str]:
    """Of the agent and of workers that have printed something, without Ray's own marks."""
    found = []
    for name, text in sorted(texts.items()):
        kept = [line for line in text.splitlines() if not NOISE.match(line)]
        if kept and (name == "agent" or WORKERS.search(name)):
            found += [f"--- {name.rpartition('/')[2]}", *kept]
    return found
