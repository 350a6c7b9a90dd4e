"""This machine as a cluster: runs a rendered dstack task file, one process tree per node.

    python -m cluster_tasks.local up     build/local/ray-cluster.dstack.yml    start, wait until it is whole
    python -m cluster_tasks.local status build/local/ray-cluster.dstack.yml    exit code 0 when it is whole, 1 when not
    python -m cluster_tasks.local down   build/local/ray-cluster.dstack.yml    stop; jobs may save a checkpoint first
    python -m cluster_tasks.local scale  rollout=2                             nodes of an elastic fleet, which join and leave
    python -m cluster_tasks.local run    build/local/ray-cluster.dstack.yml    up, hold in the foreground, down on Ctrl-C

The file is read with dstack's own parser, and its commands run as dstack runs them: joined with && in its shell, with its `files`
in the working directory and the DSTACK_* environment. What differs, as there are no containers here:

- Node N has the loopback address 127.0.0.(N+2); the dashboard has 127.0.0.1.
- A volume at /checkpoints is the folder volumes/checkpoints beside the file. Values of `env` that are such a path, or lie below
  one, are rewritten, and jobs inherit them; a program that has /checkpoints written in its code finds nothing there.
- `image`, `user`, `working_dir`, memory and disk are not looked at; Ray and Python are those of this environment.

All state is beside the file: cluster.json, logs/, nodes/, volumes/. Only Ray's sockets are elsewhere, in a short path below /tmp.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cluster_tasks.identity import TOKEN, KnownDashboard
from cluster_tasks.local.elastic import SCALE, elastic_fleets, processes, wanted, write_wanted
from cluster_tasks.local.plan import (
    MARKER,
    STOP_SECONDS,
    LocalError,
    Ports,
    dashboard_port,
    make_plan,
    make_ray_folder,
    node_addresses,
    node_gpus,
    place_files,
    read_task,
    task_environment,
    token_of,
)
from cluster_tasks.local.state import Cluster, clean_up, end, kill_marked, tail
from cluster_tasks.local.supervisor import STOP_GRACE_SECONDS
from cluster_tasks.node.dashboard import missing, ray_token
from cluster_tasks.node.ports import free_port
from cluster_tasks.node.waiting import wait_until
from cluster_tasks.ray import ROLLOUT
from stacks.dstack_api import TaskConfiguration
from stacks.errors import UserError
from stacks.host.change import parse_change
from stacks.host.locks import one_at_a_time

ROOT = Path(__file__).resolve().parents[2]
TASK_FILE = Path("build/local/ray-cluster.dstack.yml")
DASHBOARD = ["the dashboard"]  # is missing, where it does not answer
SECONDS = 120  # until the cluster must be whole, or Ray must have the nodes that were asked for
STOP_LIMIT = STOP_SECONDS + 2 * STOP_GRACE_SECONDS  # jobs save, the head ends, the workers end

console = Console(emoji=False, highlight=False, soft_wrap=True)


# Commands


def up(file: Path, port: str | None = None, timeout: float = SECONDS, hold: bool = False) -> int:
    """Starts the cluster and returns when it is whole; with `hold`, when it has ended."""
    task, root, begin = read_task(file), file.parent.resolve(), time.monotonic()
    rendered = [file, *sorted(root.glob(f"*{ROLLOUT}"))]
    digest = hashlib.sha256(b"".join(each.read_bytes() for each in rendered)).hexdigest()
    with one_at_a_time(root / "cluster.lock", LocalError(f"another `up` of {root} is at work; wait for it")):
        cluster = Cluster.running(root)
        if cluster is not None:
            if cluster.task != digest:
                raise LocalError(f"{file} has changed since its cluster was started; first: {typed('down', file)}")
            wait_until_whole(task, cluster, timeout, lambda: cluster.supervisor is not None)
            console.print(f"already up since {cluster.started}")
            say_next(file, cluster)
            return 0
        if find_spec("aiohttp_cors") is None:
            raise LocalError("Ray is installed without its dashboard, which the head needs; make install brings it")
        found, note = dashboard_port(task, port)
        if note:
            console.print(note, markup=False)
        ports = Ports(dashboard=found, gcs=free_port(), sandboxes=free_port())
        place_files(task, root)
        make_ray_folder(root)
        plan = make_plan(task, root, ports, os.environ)
        plan = replace(plan, elastic=processes(root, task, os.environ), scale=str(root / SCALE))
        write_wanted(root, {name: fleet.least for name, fleet in elastic_fleets(root).items()})
        console.print(f"starting {len(plan.nodes)} nodes, logs in {root / 'logs'}")
        with (root / "logs/supervisor.log").open("wb") as output:
            supervisor = subprocess.Popen(
                [sys.executable, "-m", "cluster_tasks.local.supervisor"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=os.environ | {MARKER: str(root)},
                cwd=ROOT,
            )
        owner = supervisor.stdin
        assert owner is not None
        url = f"http://127.0.0.1:{ports.dashboard}"
        cluster = Cluster(str(root), supervisor.pid, datetime.now(UTC).isoformat(timespec="seconds"), url, ports, digest)
        cluster.write()
        try:
            with contextlib.suppress(BrokenPipeError):  # it has ended already: what follows says so, with its log
                plan.send(owner)
            wait_until_whole(task, cluster, timeout, lambda: supervisor.poll() is None)
            console.print(f"ready after {time.monotonic() - begin:.1f} s")
            say_next(file, cluster)
            if not hold:
                owner.write(b"d")  # the cluster may live on without us
                owner.flush()
        except BaseException:
            with contextlib.suppress(BrokenPipeError):
                owner.close()  # the supervisor takes that as the request to stop
            end(supervisor, root, STOP_LIMIT)
            raise
    return watch(supervisor, root) if hold else 0


def watch(supervisor: subprocess.Popen[bytes], root: Path) -> int:
    """Until the cluster ends, or Ctrl-C ends it."""
    try:
        code = supervisor.wait()
        console.print(f"the cluster has ended with exit code {code}:\n{tail(root)}")
    except KeyboardInterrupt:
        console.print("stopping")
        supervisor.terminate()
        end(supervisor, root, STOP_LIMIT)
        return 0
    clean_up(root)
    return code


def state(file: Path) -> dict[str, Any]:
    """The nodes, and whether all are there."""
    task, root = read_task(file), file.parent.resolve()
    cluster = Cluster.running(root)
    found = alive_nodes(task, cluster) if cluster else {}
    alive = found or {}
    lacking = missing(node_addresses(task), node_gpus(task), alive) if found is not None else DASHBOARD
    absent = "MISSING" if found is not None else "UNKNOWN"
    nodes = [
        {"rank": rank, "address": address, "state": "ALIVE" if address in alive else absent}
        | {"cpus": alive.get(address, {}).get("CPU", 0), "gpus": alive.get(address, {}).get("GPU", 0)}
        | {"log": str(root / f"logs/node-{rank}.log")}
        for rank, address in enumerate(node_addresses(task))
    ]
    about = {"dashboard": cluster.dashboard, "pid": cluster.pid, "started": cluster.started} if cluster else {}
    whole = cluster is not None and not lacking
    return {"up": cluster is not None, "whole": whole, "missing": lacking, "nodes": nodes} | about


def status(file: Path, as_json: bool = False) -> int:
    """Prints the nodes; 0 when all are there, else 1."""
    known, root = state(file), file.parent.resolve()
    cluster = Cluster.running(root)
    if as_json:
        print(json.dumps(known, indent=2))
        return 0 if known["whole"] else 1
    if cluster is None:
        console.print(f"not up; start it with: {typed('up', file)}")
        return 1
    table = Table("rank", "address", "state", "CPUs", "GPUs", "log")
    for row in known["nodes"]:
        cells = row | {"log": os.path.relpath(str(row["log"]))}  # whole also where there are 80 columns
        table.add_row(*(f"{value:g}" if isinstance(value, float) else str(value) for value in cells.values()))
    console.print(table)
    if known["missing"] == DASHBOARD:
        console.print(f"the dashboard at {cluster.dashboard} does not answer; the head's log: {root / 'logs/node-0.log'}")
    else:
        waiting = f", waiting for {', '.join(known['missing'])}" if known["missing"] else ""
        console.print(f"dashboard {cluster.dashboard}, up since {cluster.started}{waiting}")
    console.print(f"to use it:  {sourced(cluster)}")
    return 0 if known["whole"] else 1


def scale(file: Path, counts: dict[str, int], timeout: float = SECONDS) -> int:
    """Starts and stops nodes of elastic fleets, by name, and returns when Ray has as many."""
    root, start = file.parent.resolve(), time.monotonic()
    fleets = elastic_fleets(root)
    for name, count in counts.items():
        if name not in fleets:
            near = get_close_matches(name, fleets, n=1)
            guess = f"; did you mean {near[0]}?" if near else ""
            raise LocalError(f"{name} is not an elastic fleet of {shown(file)}{guess} (role: rollout: {', '.join(fleets) or 'none'})")
        fleets[name].check(count)
    cluster = Cluster.running(root)
    if cluster is None:
        raise LocalError(f"not up; start it with: {typed('up', file)}")
    write_wanted(root, wanted(root) | counts)

    def missing() -> str | None:
        found = elastic_nodes(cluster)
        lacking = [
            f"{count} nodes of fleet {name}, {found.count(name)} are there" for name, count in counts.items() if found.count(name) != count
        ]
        if lacking and not cluster.supervisor:
            raise LocalError(f"the cluster ended meanwhile:\n{tail(root)}")
        return "; ".join(lacking) or None

    if line := wait_until(missing, start + timeout, lambda line: console.print(f"waiting for {line}")):
        raise LocalError(f"not within {timeout:.0f} s (--timeout): waiting for {line}; logs in {root / 'logs'}")
    console.print(f"{', '.join(f'{name}={count}' for name, count in counts.items())} after {time.monotonic() - start:.1f} s")
    return 0


def down(file: Path, timeout: float = STOP_LIMIT) -> int:
    """Stops the cluster, and kills what is left of it, and nothing else."""
    root = file.parent.resolve()
    cluster = Cluster.running(root)
    supervisor = cluster.supervisor if cluster else None
    if supervisor is None:
        left = kill_marked(root)
        console.print(f"killed {left} processes of a cluster whose supervisor is gone" if left else "not up")
        clean_up(root)
        return 0
    supervisor.terminate()
    console.print(f"stopping; jobs have {STOP_SECONDS} s to save")
    if not end(supervisor, root, timeout):
        console.print(f"not down within {timeout:.0f} s: killed")
    console.print("down")
    return 0


# What they need


def require_linux() -> None:
    """Raises LocalError."""
    if sys.platform != "linux":
        raise LocalError("cluster_tasks.local needs Linux, for its loopback addresses and its care for orphans")


def wait_until_whole(task: TaskConfiguration, cluster: Cluster, timeout: float, lives: Callable[[], bool]) -> None:
    """Until every node and GPU is ALIVE; says what is missing when that changes."""
    start = time.monotonic()

    def missing_nodes() -> str | None:
        alive = alive_nodes(task, cluster)
        names = ["the dashboard"] if alive is None else missing(node_addresses(task), node_gpus(task), alive)
        if names and not lives():
            raise LocalError(f"the cluster ended while it started:\n{tail(Path(cluster.root))}")
        return ", ".join(names) or None

    def say(line: str) -> None:
        console.print(f"waiting for {line}, {time.monotonic() - start:.0f} s of {timeout:.0f}")

    if line := wait_until(missing_nodes, start + timeout, say):
        raise LocalError(f"not ready within {timeout:.0f} s (--timeout): waiting for {line}\n{tail(Path(cluster.root))}")


def alive_nodes(task: TaskConfiguration, cluster: Cluster) -> dict[str, dict[str, float]] | None:
    """Resources of the nodes by address; None where the dashboard does not answer. Raises LocalError where another cluster's does."""
    root = Path(cluster.root)
    try:
        token = ray_token({"RAY_AUTH_MODE": "token", **task_environment(task, root, os.environ), "RAY_AUTH_TOKEN": token_of(root)})
        return KnownDashboard(cluster.dashboard, token, source=str(root / TOKEN)).alive_nodes()
    except ValueError as error:
        raise LocalError(str(error)) from None


def elastic_nodes(cluster: Cluster) -> list[str]:
    """The fleet of each elastic node that is ALIVE."""
    root = Path(cluster.root)
    return list(KnownDashboard(cluster.dashboard, token_of(root), source=str(root / TOKEN)).elastic_nodes().values())


def say_next(file: Path, cluster: Cluster) -> None:
    by_token = f"the page asks for the token: cat {shown(Path(cluster.root) / TOKEN)}"
    opened = f"logged in: {typed('open', file)}" if _stack(file) else by_token
    console.print(f"dashboard  {cluster.dashboard}  ({opened})")
    by_hand = f"{sourced(cluster)} && ray job submit --working-dir . -- python your_script.py"
    console.print(f"submit     {typed('submit', file) + ' -- python your_script.py' if _stack(file) else by_hand}")
    console.print(f"stop       {typed('down', file)}")


def typed(verb: str, file: Path) -> str:
    """A command for a task file as a person types it: flotilla's, where the file is that of a stack of this project."""
    return f"flotilla {verb} {_stack(file)}" if _stack(file) else f"python -m cluster_tasks.local {verb} {shown(file)}"


def _stack(file: Path) -> str | None:
    folder = file.parent.resolve()
    return folder.name if file.name == TASK_FILE.name and folder.parent == ROOT / "build" else None


def sourced(cluster: Cluster) -> str:
    """What sets up a shell for the cluster: env.sh, which reads the address that `up` leaves beside it, or the same by hand."""
    script, token = Path(cluster.root) / "env.sh", Path(cluster.root) / TOKEN
    exports = f"export RAY_ADDRESS={cluster.dashboard} RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={token}"
    return f". {shown(script)}" if script.is_file() else exports


def shown(path: Path) -> str:
    """As a person types it in the current folder."""
    return os.path.relpath(path)


def default_file() -> Path:
    """The rendered task of the stack `local`, looked for from the current folder upwards, and beside this package."""
    here = Path.cwd()
    return next((folder / TASK_FILE for folder in (here, *here.parents, ROOT) if (folder / TASK_FILE).is_file()), TASK_FILE)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m cluster_tasks.local", description="Runs a dstack task file on this machine.")
    commands = parser.add_subparsers(dest="command", required=True)
    about = {"up": "start", "run": "start and hold", "status": "show the nodes", "down": "stop", "scale": "start or stop elastic nodes"}
    for name, text in about.items():
        command = commands.add_parser(name, help=text)
        if name == "scale":
            command.add_argument("changes", nargs="+", metavar="FLEET=N", help="such as rollout=2")
            command.add_argument("--file", type=Path, default=default_file(), help=f"default: {TASK_FILE} of this project")
            command.add_argument("--timeout", type=float, default=SECONDS, help="seconds until Ray must have as many")
            continue
        command.add_argument("file", type=Path, nargs="?", default=default_file(), help=f"default: {TASK_FILE} of this project")
        if name in ("up", "run"):
            command.add_argument("--port", help="of the dashboard; auto: the next free one")
            command.add_argument("--timeout", type=float, default=SECONDS, help="seconds until it must be whole")
        if name == "status":
            command.add_argument("--json", action="store_true")
        if name == "down":
            command.add_argument("--timeout", type=float, default=STOP_LIMIT, help="seconds until it is killed")
    options: Any = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        require_linux()
        if options.command in ("up", "run"):
            return up(options.file, options.port, options.timeout, hold=options.command == "run")
        if options.command == "scale":
            return scale(options.file, dict(map(parse_change, options.changes)), options.timeout)
        return status(options.file, options.json) if options.command == "status" else down(options.file, options.timeout)
    except UserError as error:
        console.print(str(error), style="red", markup=False)
        return 2
    except KeyboardInterrupt:
        console.print("interrupted; nothing was left running")
        return 130
