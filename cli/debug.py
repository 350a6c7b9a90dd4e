"""`flotilla debug`: what the processes of a cluster are doing, and an archive of all that it has written."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from cli.dashboard import dashboard, unreachable
from cli.project import CommandError, environment, folder
from cluster_tasks.debug import gather, harvest, post_mortem, stacks
from stacks.errors import UserError
from stacks.host import command_line
from stacks.load import load
from stacks.places import place_of
from stacks.schema import Stack

STACKS = ("flotilla debug stacks local", "flotilla debug stacks onprem --all")
COLLECT = ("flotilla debug collect onprem --output hang.tar.gz",)
POST_MORTEM = ("flotilla debug post-mortem local",)


def main(verb: str, arguments: list[str], root: Path) -> int:
    parser = command_line.parser(prog := "flotilla debug", "Find out why a cluster hangs.", (*STACKS, *COLLECT, *POST_MORTEM))
    kinds = parser.add_subparsers(dest="what", required=True, metavar="stacks|collect|post-mortem", prog=prog)
    about = "Print the Python stack of every process, identical stacks grouped, and which\nprocess waits for which."
    shows = kinds.add_parser("stacks", help="stack of every process, and who waits for whom", **command_line.settings(about, STACKS))
    about = "Write one archive of logs, versions, rendered files and process stacks, without\nsecrets."
    collects = kinds.add_parser("collect", help="one archive of logs, versions and stacks", **command_line.settings(about, COLLECT))
    about = "List tasks that Ray's debugger holds at an uncaught error, and how to attach."
    pauses = kinds.add_parser("post-mortem", help="tasks held at an uncaught error", **command_line.settings(about, POST_MORTEM))
    command_line.add_stack(shows)
    shows.add_argument("--all", action="store_true", help="also Ray's own processes, node agents and idle workers")
    shows.add_argument("--node", help="only this node: its rank on a local cluster, else its address")
    command_line.add_stack(collects)
    collects.add_argument("--output", metavar="FILE", help="a new file (flotilla-STACK-TIME.tar.gz in this folder)")
    command_line.add_stack(pauses, "; its job was submitted with --post-mortem")
    options: Any = parser.parse_args(arguments)
    stack = load(options.stack, root)
    return {"stacks": show_stacks, "collect": collect, "post-mortem": show_paused}[options.what](stack, root, options)


def show_stacks(stack: Stack, root: Path, options: Any) -> int:
    begin = time.monotonic()
    found = processes(stack, root)
    if options.node is not None:
        known = sorted({process.node for process in found})
        found = [process for process in found if process.node == options.node]
        if not found:
            raise CommandError(f"--node {options.node}: the cluster {stack.name} has no such node; it has {', '.join(known)}")
    for line in stacks.shown(found, options.all):
        print(line)
    print(f"\nread in {time.monotonic() - begin:.1f} s", file=sys.stderr)
    return 0


def show_paused(stack: Stack, root: Path, options: Any) -> int:
    asked = dashboard(stack, root)
    try:
        held = post_mortem.paused(asked)
    except OSError as error:
        raise unreachable(asked, stack, error) from None
    place = place_of(stack)
    tunnel = None if not place.remote else "LOGIN-NODE" if place.batch else stack.task.name  # dstack notes the run for ssh
    for line in post_mortem.shown(held, tunnel):
        print(line)
    return 0


def collect(stack: Stack, root: Path, options: Any) -> int:
    """What cannot be had is said in the archive and here; the rest is in it."""
    from cluster_tasks.debug import collect as archive

    file = Path(options.output or f"flotilla-{stack.name}-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz").absolute()
    archive.check_output(file)
    place = folder(stack.name, root).resolve()
    shell = environment(stack.name, root)
    secrets = archive.known_secrets(stack, place, shell) | _of_jobs(stack, root)
    nodes: dict[str, Any] = {}
    missing: list[str] = []
    try:
        if place_of(stack).remote:
            from_shell = [name for name, value in stack.task.env.items() if value is None]
            nodes = gather.logs_by_job(dashboard(stack, root), from_shell)
        else:
            nodes = archive.of_local(stack, place, gather.agents(local_cluster(stack, place).pid), secrets)
    except (OSError, UserError) as error:
        missing.append(f"logs of the nodes: {error}")
    texts = archive.texts_of(nodes)
    texts |= {f"stack/{name}": text for name, text in archive.rendered(place, secrets).items()}
    for name, command in _scheduler(stack, root).items():
        if text := harvest.output(command, secrets, shell):
            texts[f"here/{name}"] = text
        else:
            missing.append(f"here/{name}: {command[0]} is not installed here, or had nothing to say")
    texts["here/versions.txt"] = harvest.versions()
    try:
        texts["stacks.txt"] = "\n".join(stacks.shown(processes(stack, root), everything=True)) + "\n"
    except (OSError, UserError) as error:
        missing.append(f"stacks of processes: {error}")
    texts |= harvest.traces(place / "volumes/checkpoints/flight-recorder", secrets)
    texts |= {"missing.txt": "\n".join(missing) + "\n"} if missing else {}
    size = archive.write(file, texts, secrets)
    for line in missing:
        print(f"missing: {line}", file=sys.stderr)
    cut = sum(name.endswith("/cut.txt") for name in texts)
    print(f"{file}  {size / 2**20:.1f} MiB, {len(texts)} files{f'; cut.txt of {cut} nodes says what was cut' if cut else ''}")
    return 0


def _of_jobs(stack: Stack, root: Path) -> set[str]:
    """Secrets that jobs were given by their runtime environments; those that have ended have no process to ask."""
    try:
        jobs = dashboard(stack, root).ask("/api/jobs/")
        given = [(job.get("runtime_env") or {}).get("env_vars") or {} for job in jobs]
        return set().union(*(harvest.secret_values(variables) for variables in given))
    except (OSError, UserError):  # it is not up; what is said of that comes with its logs
        return set()


def _scheduler(stack: Stack, root: Path) -> dict[str, list[str]]:
    """What the scheduler says of the cluster's run, by name of the text."""
    if place_of(stack).batch:
        from cli.places.slurm import noted, there

        job, at = noted(stack, root), there(stack, root)
        fields = "JobID,JobName,State,ExitCode,Elapsed,NodeList,MaxRSS"
        asked = {"sacct.txt": ["sacct", *at, "-j", job, "--format", fields], "scontrol.txt": ["scontrol", *at, "show", "job", job]}
        return asked if job else {}
    if not place_of(stack).remote:
        return {}
    dstack = str(Path(sys.executable).with_name("dstack"))
    events = [dstack, "event", "list", "--within-run", stack.task.name]
    return {"dstack-runs.txt": [dstack, "ps", "-v"], "dstack-logs.txt": [dstack, "logs", stack.task.name], "dstack-events.txt": events}


def local_cluster(stack: Stack, place: Path) -> Any:
    """Raises CommandError where it is not up."""
    from cluster_tasks.local.state import Cluster

    cluster = Cluster.running(place)
    if cluster is None:
        raise CommandError(f"the cluster {stack.name} is not up; first: flotilla up {stack.name}")
    return cluster


def processes(stack: Stack, root: Path) -> list[stacks.Process]:
    """Of all nodes. Raises CommandError where there is no cluster, DebugError where it cannot be seen."""
    if not place_of(stack).remote:
        from cluster_tasks.local.plan import node_addresses, read_task

        place = folder(stack.name, root).resolve()
        cluster = local_cluster(stack, place)
        addresses = node_addresses(read_task(place / "ray-cluster.dstack.yml"))
        nodes = gather.here(cluster.pid)
        known = gather.known(dashboard(stack, root))  # after it: an actor that starts meanwhile has its name
        ranks = {address: str(rank) for rank, address in enumerate(addresses)}
        by_rank = {(ranks.get(address, ""), pid): process for (address, pid), process in known.items()}
        return stacks.processes(nodes, by_rank)
    asked = dashboard(stack, root)
    try:
        nodes = gather.by_job(asked)
    except OSError as error:
        raise unreachable(asked, stack, error) from None
    for node, said in nodes.items():
        if said.get("error"):
            print(f"node {node} cannot be seen: {said['error']}", file=sys.stderr)
    return stacks.processes(nodes, gather.known(asked))
