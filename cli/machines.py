"""A stack of machines that dstack drives: your own over SSH, or a cloud's."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from cli import budget, tunnel
from cli.dashboard import note_address
from cli.project import CommandError, console, run
from cluster_tasks.client import status as screen
from cluster_tasks.client.dstack_run import DstackRun, wait
from cluster_tasks.client.launch import cluster
from cluster_tasks.ray import ROLLOUT
from stacks.host.forward import LOOK_SECONDS, NoForward, forwarded
from stacks.places import place_of
from stacks.schema import Fleet, Stack

TIMEOUT = 1800


def up(stack: Stack, root: Path, options: Any) -> int:
    """Fleets, the Ray cluster, and its dashboard forwarded until `flotilla down`."""
    os.chdir(root)
    budget.require(stack, root, [(fleet, fleet.least) for fleet in stack.elastic_fleets()])
    with forwarded(stack, say=_say):
        return _up(stack, root, options)


def _up(stack: Stack, root: Path, options: Any) -> int:
    if stack.control_node:
        run([sys.executable, "-m", "fleets.server", "login", stack.name], root)
    seconds = options.timeout or TIMEOUT
    dstack = cluster(stack, int(options.port) if options.port else None)
    dstack.apply(machines=not _driven(stack), seconds=seconds)
    dstack.wait_until_running(seconds)
    attached = dstack.connect(seconds)
    note_address(stack, root, dstack.dashboard.url)
    if attached:
        tunnel.keep(attached, dstack.folder)

    def missing() -> str | None:
        dstack.must_live()
        found, wanted = len(dstack.dashboard.alive_nodes() or {}), dstack.nodes()
        return f"waiting for Ray: {found} of {wanted} nodes" if found < wanted else None

    wait(missing, seconds)
    for fleet in stack.elastic_fleets():
        _start(stack, root, dstack, fleet, fleet.least)
    console.print(f"dashboard  {dstack.dashboard.url}")
    console.print(f"submit     flotilla submit {stack.name} -- python -m trainer.train_ppo --config run.yaml", markup=False)
    console.print(f"stop       flotilla down {stack.name}")
    return 0


def down(stack: Stack, root: Path, options: Any) -> int:
    """The run, the tunnel, the fleets, and what Pulumi made in the cloud."""
    os.chdir(root)
    try:
        with forwarded(stack, LOOK_SECONDS, _say):
            _stop(stack, root, options)
    except NoForward as error:
        raise CommandError(f"{error}; where it has no machines any more: pulumi destroy --stack {stack.name}") from None
    if options.keep_machines:
        return 0
    if place_of(stack).cloud or _driven(stack):
        destroy = ["pulumi", "destroy", "--stack", stack.name, *(["--yes"] if options.yes else [])]
        if not options.yes and not os.isatty(0):
            raise CommandError(f"the cluster and its machines are gone; network and checkpoints are left: {' '.join(destroy)}")
        run(destroy, root)
    return 0


def _stop(stack: Stack, root: Path, options: Any) -> None:
    dstack = cluster(stack, None)
    for node in [node for fleet in stack.elastic_fleets() for node in dstack.of_fleet(fleet.name, fleet.nodes) if node.lives()]:
        run(["dstack", "stop", "-y", node.name], root, dstack.env)
    if dstack.lives():
        run(["dstack", "stop", "-y", dstack.name], root, dstack.env)
        wait(lambda: f"waiting for {dstack.name} to end" if dstack.lives() else None, TIMEOUT)
    tunnel.close(dstack.folder)
    if options.keep_machines or _driven(stack):
        return
    known = {fleet.name for fleet in dstack.fleets()}
    for fleet in stack.dstack_fleets():
        if fleet.name in known:
            run(["dstack", "fleet", "delete", "-y", fleet.name], root, dstack.env)


def scale(stack: Stack, root: Path, counts: list[tuple[Fleet, int]]) -> int:
    """A run for each elastic node; the first N of a fleet run, the others are stopped. dstack brings back those that it loses."""
    os.chdir(root)
    with forwarded(stack, say=_say):
        dstack = cluster(stack, None)
        if not dstack.lives():
            raise CommandError(f"the cluster {stack.name} is not up, so there is nothing to join; first: flotilla up {stack.name}")
        for fleet, count in counts:
            for node in dstack.of_fleet(fleet.name, fleet.nodes)[count:]:
                if node.lives():
                    run(["dstack", "stop", "-y", node.name], root, dstack.env)
            _start(stack, root, dstack, fleet, count)
    console.print(f"each joins as soon as dstack has a machine for it: flotilla status {stack.name}", markup=False)
    return 0


def _start(stack: Stack, root: Path, dstack: DstackRun, fleet: Fleet, count: int) -> None:
    """Those of the fleet's first nodes that are missing."""
    for node in dstack.of_fleet(fleet.name, count):
        node.wait_until_stopped(TIMEOUT)
        if not node.lives():
            file = f"build/{stack.name}/{fleet.name}{ROLLOUT}"
            run(["dstack", "apply", "-y", "-d", "-n", node.name, "-f", file], root, dstack.env)


def status(stack: Stack, root: Path, options: Any) -> int:
    os.chdir(root)
    return screen.main([stack.name, *(["--json"] if options.json else [])])


def _say(line: str) -> None:
    console.print(line, markup=False)


def _driven(stack: Stack) -> bool:
    """Whether `pulumi up` makes dstack's fleets and volumes."""
    return stack.dstack is not None and stack.dstack.drive
