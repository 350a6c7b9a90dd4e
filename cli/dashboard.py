"""The dashboard of a stack's cluster on this machine: where it is, and the jobs that it knows."""

from __future__ import annotations

import time
from pathlib import Path

from cli.project import CommandError, environment, folder
from cluster_tasks.client.usage import look
from cluster_tasks.identity import KnownDashboard
from cluster_tasks.node.dashboard import Dashboard
from cluster_tasks.price import hourly
from stacks.places import place_of
from stacks.schema import Stack

URL = "dashboard.url"  # in build/<stack>/, where `flotilla up --port` has moved it


def note_address(stack: Stack, root: Path, url: str) -> None:
    (folder(stack.name, root) / URL).write_text(f"{url}\n")


def address(stack: Stack, root: Path) -> str:
    """Raises CommandError where the cluster is one of this machine's and not up; of others only asking says it."""
    if not place_of(stack).remote:
        from cluster_tasks.local.state import Cluster

        cluster = Cluster.running(folder(stack.name, root).resolve())
        if cluster is None:
            raise CommandError(f"the cluster {stack.name} is not up; first: flotilla up {stack.name}")
        return cluster.dashboard
    noted = folder(stack.name, root) / URL
    return noted.read_text().strip() if noted.exists() else f"http://localhost:{stack.task.dashboard_port}"


def dashboard(stack: Stack, root: Path) -> Dashboard:
    """One that has to prove that it is this stack's, before it sees the token."""
    return KnownDashboard.of(address(stack, root), environment(stack.name, root))


def show_jobs(asked: Dashboard, stack: Stack) -> None:
    """One line for each of the newest jobs; what the cluster and those that run have cost, and how many GPUs idle."""
    try:
        found = look(asked, time.time(), hourly(stack))
    except OSError:
        return  # the state of the nodes says it
    for job in found.jobs:
        print(f"job {job.name}  {job.status}  {job.command}")
    for line in found.lines():
        print(line)


def unreachable(asked: Dashboard, stack: Stack, error: OSError) -> CommandError:
    if getattr(error, "code", None) == 404:
        return CommandError(f"the cluster {stack.name} has no such job; flotilla status {stack.name} lists them")
    return CommandError(f"{asked.url} does not answer ({getattr(error, 'reason', error)}); first: flotilla up {stack.name}")
