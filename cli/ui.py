"""`flotilla ui`: the page of runs in the browser; of a cluster, whose head serves it, or of a folder, served from here.

Without a cluster this machine runs what a head does: the page on a socket in a private folder, and the front that asks for a token.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cli import open_page
from cli.dashboard import dashboard
from cli.project import CommandError, console, folder
from cluster_tasks.node import identity
from cluster_tasks.node.dashboard import Dashboard
from cluster_tasks.node.lifeline import die_with_parent
from cluster_tasks.node.ports import free_port, port_is_free
from cluster_tasks.node.run_page import ROUTE
from stacks.host import command_line
from stacks.load import load

MARKS = ("run.yaml", "metrics.jsonl", "model")  # of a run's folder
START_SECONDS = 30


def main(verb: str, arguments: list[str], root: Path) -> int:
    examples = ("flotilla ui local", "flotilla ui local demo", "flotilla ui --runs build/local/runs")
    parser = command_line.parser(f"flotilla {verb}", "Open the page of runs in the browser: curves, answers, timelines, cost.", examples)
    command_line.add_stack(parser, nargs="?")
    parser.add_argument("run", metavar="RUN", nargs="?", help="the run to show first")
    parser.add_argument("--runs", type=Path, action="append", metavar="FOLDER", help="folder of runs, or of one; needs no cluster")
    parser.add_argument("--port", type=int, help="where the page answers with --runs (a free one)")
    options = parser.parse_args(arguments)
    if options.runs:
        if options.stack:
            raise CommandError(f"flotilla ui {options.stack} --runs: give a stack or --runs, not both")
        return from_here(options.runs, options.port, root)
    if not options.stack:
        raise CommandError("flotilla ui: give a stack whose cluster is up, or --runs FOLDER")
    if options.port:
        raise CommandError("--port is for --runs; a cluster's page answers on its dashboard's port")
    stack = load(options.stack, root)
    try:
        asked = dashboard(stack, root)
    except CommandError as error:
        runs = folder(stack.name, root) / "runs"
        raise CommandError(f"{error}; its runs without it: flotilla ui --runs {runs}") if runs.is_dir() else error from None
    ticket = open_page.ticket_of(asked, stack)
    require(asked, options.run, stack.name)
    return open_page.show(asked, ticket, open_page.runs_page(options.run), f"the runs of {stack.name}", folder(stack.name, root))


def require(asked: Dashboard, run: str | None, stack: str) -> None:
    """Raises CommandError where the cluster has no page, or not this run."""
    try:
        known = [row["name"] for row in asked.ask(f"/flotilla/at/{ROUTE}/api/runs")["runs"]]
    except (OSError, KeyError, TypeError) as error:
        why = getattr(error, "reason", error)
        older = "its head was started by an older Flotilla, or lacks aiohttp"
        raise CommandError(f"the cluster {stack} serves no page of runs ({why}): {older}") from None
    if run and run not in known:
        there = ", ".join(known[:5]) or "none yet"
        raise CommandError(f"RUN={run}: the cluster {stack} has no such run; there are: {there}")


def from_here(folders: list[Path], port: int | None, root: Path) -> int:
    """Serves until Ctrl-C. Raises CommandError."""
    for each in folders:
        if not each.is_dir():
            raise CommandError(f"--runs {each}: no such folder")
        if not any((place / mark).exists() for place in (each, *each.glob("*")) for mark in MARKS):
            raise CommandError(f"--runs {each}: neither a run nor a folder of runs ({', '.join(MARKS)}) is there")
    if port is not None and not (0 < port < 65536 and port_is_free(port)):
        raise CommandError(f"--port {port}: in use, or no port of 1 to 65535; leave it out for a free one")
    with tempfile.TemporaryDirectory(prefix="flotilla-ui-") as made, serving(Path(made), folders, port or free_port(), root) as asked:
        ticket = asked.ask(identity.TICKET, {})["ticket"]
        open_page.show(asked, ticket, open_page.runs_page(), f"the runs of {', '.join(map(str, folders))}", Path(made))
        console.print("Ctrl-C ends it")
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # the same, so that nothing stays in the temporary folder
        try:
            while True:
                time.sleep(3600)
        except KeyboardInterrupt:
            return 0


@contextmanager
def serving(private: Path, folders: list[Path], port: int, root: Path) -> Iterator[Dashboard]:
    """Page and front inside the `with`. Raises CommandError where one does not come up."""
    token, socket, routes = secrets.token_hex(32), private / "page.sock", private / "routes"
    routes.mkdir()
    (routes / ROUTE).write_text(json.dumps({"socket": str(socket)}))
    page = [sys.executable, str(root / "trainer/page"), "--socket", str(socket), *(str(each.resolve()) for each in folders)]
    front = [sys.executable, "-I", identity.__file__, "--listen", str(port), "--ray", str(free_port()), "--routes", str(routes)]
    env = {**os.environ, identity.TOKEN: token}
    with (private / "log").open("wb") as log:
        started = [
            subprocess.Popen(command, cwd=root, env=env, stdout=log, stderr=log, start_new_session=True, preexec_fn=die_with_parent)  # noqa: PLW1509
            for command in (page, front)
        ]
    asked, deadline = Dashboard(f"http://127.0.0.1:{port}", token), time.monotonic() + START_SECONDS
    try:
        while not answers(asked):
            ended = [process for process in started if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                lines = (private / "log").read_text(errors="replace").strip().splitlines() or [f"no answer within {START_SECONDS} s"]
                raise CommandError(f"the page of runs does not start: {lines[-1]}")
            time.sleep(0.05)
        yield asked
    finally:
        for process in started:
            process.terminate()
            process.wait()


def answers(asked: Dashboard) -> bool:
    try:
        return "runs" in asked.ask(f"/flotilla/at/{ROUTE}/api/runs")
    except OSError:
        return False
