"""The cluster of a stack on dstack: started, connected to this machine, scaled and stopped. `flotilla up` and `launch` share it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from cluster_tasks import identity
from cluster_tasks.client.attachment import connected
from cluster_tasks.client.dstack_run import ROOT, ClusterError, DstackRun, run_command, wait
from cluster_tasks.client.dstack_server import connect
from cluster_tasks.ray import ROLLOUT
from stacks.host.proxies import direct
from stacks.places import place_of
from stacks.schema import Fleet, Stack

STOP_SECONDS = 1800  # for an elastic node that is being stopped


def environment(stack: Stack, folder: Path, url: str) -> dict[str, str]:
    """What `. build/<stack>/env.sh` sets. Raises ClusterError where the files are not there."""
    lacking = [file.name for file in (folder / identity.TOKEN, folder / "ray-cluster.dstack.yml") if not file.is_file()]
    if lacking:
        how = f"pulumi up --stack {stack.name}, or without its CLI flotilla preview {stack.name}"
        raise ClusterError(f"{os.path.relpath(folder / lacking[0], ROOT)} is missing; first: {how}")
    env = os.environ | identity.environment(folder, url) | ({"DSTACK_PROJECT": stack.dstack.project} if stack.dstack else {})
    return direct(env, url)


def cluster(stack: Stack, port: int | None) -> DstackRun:
    """The stack's run, whether it is there or not. Raises ClusterError, ConnectionFailed."""
    if start := place_of(stack).start:
        raise ClusterError(f"stacks/Pulumi.{stack.name}.yaml: flotilla:cloud: {stack.cloud} needs no dstack; there it is {start}")
    port = port or stack.task.dashboard_port
    url, folder = f"http://localhost:{port}", ROOT / "build" / stack.name
    env = environment(stack, folder, url)
    dashboard, fleet = identity.KnownDashboard.of(url, env), stack.cluster_fleets()[0].name
    order = stack.ordered_backends()
    return DstackRun(connect(stack), stack.task.name, folder, env, dashboard, port, fleet, stack.monitoring.ports, order)


def pulumi_makes_fleets(stack: Stack) -> bool:
    """Whether `pulumi up` makes dstack's fleets and volumes."""
    return stack.dstack is not None and stack.dstack.drive


@contextlib.contextmanager
def ready(run: DstackRun, seconds: float, keep: bool = False) -> Iterator[None]:
    """Ray has every node of the run, and its dashboard answers here while the block runs; with `keep` also after it.

    Each wait has so many seconds. Raises ClusterError.
    """

    run.wait_until_running(seconds)
    with connected(run, seconds, keep) as attachment:

        def missing() -> str | None:
            if line := attachment.missing():  # dstack may submit the run anew meanwhile
                return line
            found, wanted = len(run.dashboard.alive_nodes() or {}), run.nodes()
            return f"waiting for Ray: {found} of {wanted} nodes" if found < wanted else None

        wait(missing, seconds)
        yield


def scale(run: DstackRun, fleet: Fleet, count: int) -> None:
    """The first `count` nodes of an elastic fleet run, the others are stopped. dstack brings back those that it loses."""
    for node in run.of_fleet(fleet.name, fleet.nodes)[count:]:
        if node.lives():
            node.stop()
    start_nodes(run, fleet, count)


def start_nodes(run: DstackRun, fleet: Fleet, count: int) -> None:
    """Those of the fleet's first nodes that are missing."""
    for node in run.of_fleet(fleet.name, count):
        node.wait_until_stopped(STOP_SECONDS)
        if not node.lives():
            file = os.path.relpath(run.folder / f"{fleet.name}{ROLLOUT}", ROOT)
            run_command(["dstack", "apply", "-y", "-d", "-n", node.name, "-f", file], run.env)


def stop(stack: Stack, run: DstackRun) -> None:
    """The run and its elastic nodes."""
    for node in (node for fleet in stack.elastic_fleets() for node in run.of_fleet(fleet.name, fleet.nodes)):
        if node.lives():
            node.stop()
    if run.lives():
        run.stop()
