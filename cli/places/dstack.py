"""A stack of machines that dstack drives: your own over SSH, or a cloud's."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from cli import budget
from cli.dashboard import note_address
from cli.places.protocol import Down, Up
from cli.project import CommandError, console, run
from cluster_tasks.client import cluster as on_dstack
from cluster_tasks.client import status as screen
from cluster_tasks.client import tunnel
from cluster_tasks.client.cluster import cluster, pulumi_makes_fleets, ready, start_nodes
from cluster_tasks.client.dstack_run import say, wait
from stacks.host.forward import LOOK_SECONDS, NoForward, forwarded
from stacks.places import place_of
from stacks.schema import Fleet, Stack

TIMEOUT = 1800


def up(stack: Stack, root: Path, options: Up) -> int:
    """Fleets, the Ray cluster, and its dashboard forwarded until `flotilla down`."""
    os.chdir(root)
    budget.require(stack, [(fleet, fleet.least) for fleet in stack.elastic_fleets()])
    with forwarded(stack, say=say):
        return _up(stack, root, options.port_number(), options.timeout or TIMEOUT)


def _up(stack: Stack, root: Path, port: int | None, seconds: float) -> int:
    if stack.control_node:
        run([sys.executable, "-m", "cli", "server", "login", stack.name], root)
    dstack = cluster(stack, port)
    dstack.apply(machines=not pulumi_makes_fleets(stack), seconds=seconds)
    note_address(stack, root, dstack.dashboard.url)
    with ready(dstack, seconds, keep=True):
        for fleet in stack.elastic_fleets():
            start_nodes(dstack, fleet, fleet.least)
    console.print(f"dashboard  {dstack.dashboard.url}")
    console.print(f"submit     flotilla submit {stack.name} -- python -m trainer.train_ppo --config run.yaml", markup=False)
    console.print(f"stop       flotilla down {stack.name}")
    return 0


def down(stack: Stack, root: Path, options: Down) -> int:
    """The run, the tunnel, the fleets, and what Pulumi made in the cloud."""
    os.chdir(root)
    try:
        with forwarded(stack, LOOK_SECONDS, say):
            _stop(stack, root, options.keep_machines)
    except NoForward as error:
        raise CommandError(f"{error}; where it has no machines any more: pulumi destroy --stack {stack.name}") from None
    if options.keep_machines:
        return 0
    if place_of(stack).cloud or pulumi_makes_fleets(stack):
        destroy = ["pulumi", "destroy", "--stack", stack.name, *(["--yes"] if options.yes else [])]
        if not options.yes and not os.isatty(0):
            raise CommandError(f"the cluster and its machines are gone; network and checkpoints are left: {' '.join(destroy)}")
        run(destroy, root)
    return 0


def _stop(stack: Stack, root: Path, keep_machines: bool) -> None:
    dstack = cluster(stack, None)
    on_dstack.stop(stack, dstack)
    wait(lambda: f"waiting for {dstack.name} to end" if dstack.lives() else None, TIMEOUT)
    tunnel.close(dstack.folder)
    if keep_machines or pulumi_makes_fleets(stack):
        return
    known = {fleet.name for fleet in dstack.fleets()}
    for fleet in stack.dstack_fleets():
        if fleet.name in known:
            run(["dstack", "fleet", "delete", "-y", fleet.name], root, dstack.env)


def scale(stack: Stack, root: Path, counts: list[tuple[Fleet, int]]) -> int:
    """A run for each elastic node."""
    os.chdir(root)
    with forwarded(stack, say=say):
        dstack = cluster(stack, None)
        if not dstack.lives():
            raise CommandError(f"the cluster {stack.name} is not up, so there is nothing to join; first: flotilla up {stack.name}")
        for fleet, count in counts:
            on_dstack.scale(dstack, fleet, count)
    console.print(f"each joins as soon as dstack has a machine for it: flotilla status {stack.name}", markup=False)
    return 0


def status(stack: Stack, root: Path, as_json: bool) -> int:
    os.chdir(root)
    return screen.show_stack(stack, as_json)
